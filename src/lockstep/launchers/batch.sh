#!/bin/bash
# Written by lockstep submit.
#SBATCH --job-name={{ quote(batch.name) }}
#SBATCH --chdir={{ quote(batch.folder) }}
#SBATCH --nodes={{ job.nodes }}
#SBATCH --ntasks-per-node={{ job.processes_per_node }}
{% if batch.time %}
#SBATCH --time={{ batch.time }}
{% endif %}
{% for option, value in job.resources.named.items() %}
#SBATCH {{ quote(option ~ "=" ~ value) }}
{% endfor %}
# What Slurm and the ranks print; a start that goes on adds to it.
#SBATCH --output={{ quote(batch.log) }}
#SBATCH --open-mode=append
# The ranks, not this script, are warned before the time is over (up to a minute earlier: Slurm looks that seldom).
# They finish the step, save and exit with 75.
#SBATCH --signal=USR1@{{ batch.warn_before_s }}
# Allows Slurm to start the job again: after a node failed, and where the end of this script asks for it.
#SBATCH --requeue
{% if job.options %}
# --option
#SBATCH {{ join(job.options) }}
{% endif %}

# srun does not take these over from the job by itself, since Slurm 22.05.
if [ -n "${SLURM_CPUS_PER_TASK:-}" ]; then export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK; fi
# The ranks sign with it what they send each other. Drawn at each start, it is in no file and no command line.
if [ -z "${ {{- secret }}:-}" ]; then {{ secret }}=$(od -An -v -N32 -tx1 /dev/urandom | tr -d ' \n'); fi
export {{ secret }}
{% if batch.on_again %}

# The checkpoint to begin from was for the first start.
words=()
if [ -e {{ quote(batch.run) }}/config.yaml ]; then words=({{ join(batch.on_again) }}); fi
{% endif %}

echo "job $SLURM_JOB_ID, start $((${SLURM_RESTART_COUNT:-0} + 1)), on $SLURM_JOB_NODELIST"
size=$(stat --format=%s {{ quote(batch.run ~ "/events.jsonl") }} 2> /dev/null)
# One failed rank ends all. The run folder is named, so that each start goes on in it.
{{ call }}{% if batch.on_again %} "${words[@]}"{% endif %}

code=$?

# The last event of this start shows whether it was stopped by a signal and is saved. The exit code is 75 then, but for
# ranks that srun kills while they end, because others have ended. A saved run starts again by itself after the
# warning. So does one whose nodes another job takes (Slurm sends SIGTERM then): also where that came before training
# began, and killed it. Not after scancel, nor where somebody put it back into the queue already: it does not count as
# running then, but asking for a new start would give it one.
reason=
if [ "$code" -ne 0 ] && [ "$(stat --format=%s {{ quote(batch.run ~ "/events.jsonl") }} 2> /dev/null)" != "$size" ]; then
    reason=$(tail -n 1 {{ quote(batch.run ~ "/events.jsonl") }} | sed -n 's/^{"event": "stopped",.*"reason": "\([A-Z0-9]*\)".*/\1/p')
fi
said="stopped by ${reason:-a signal}${reason:+ and saved}"
if [ "$reason" = SIGUSR1 ] || [ "$reason" = SIGTERM ] || [ "$code" -gt 128 ]; then
    # A Slurm that moves many jobs at once may not answer.
    for pause in 0 5 10 20 30; do
        sleep "$pause"
        state=
        read -r state preempted < <(squeue --noheader --jobs="$SLURM_JOB_ID" --Format=State,PreemptTime)
        if [ -z "$state" ]; then continue; fi
        if [ "$state" = RUNNING ] && { [ "$reason" = SIGUSR1 ] || [[ $preempted == [0-9]* ]]; }; then
            echo "$said: back into the queue"
            scontrol requeue "$SLURM_JOB_ID" || continue
        fi
        exit "$code"
    done
    echo "$said, but Slurm has not put it back into the queue; to go on:"
    echo "scontrol requeue $SLURM_JOB_ID"
fi
exit "$code"
