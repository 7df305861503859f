"""Schedules as a user would write them: some that work, and what can be wrong with one."""

import math
import random


def one_cycle(epoch, epochs, peak=0.3):
    """Rise to the base rate, then fall to nothing."""
    done = epoch / epochs
    return done / peak if done < peak else (1 - done) / (1 - peak)


def gone(epoch, epochs):
    return math.nan if epoch > epochs / 2 else 1.0


def negative(epoch, epochs):
    return 0.5 - epoch


def words(epoch, epochs):
    return "fast"


def divides(epoch, epochs):
    return 1 / (epoch - epoch)


calls = []


def counts(epoch, epochs):
    calls.append(epoch)
    return 1 / len(calls)


def draws(epoch, epochs):
    return random.random()


number = 3
