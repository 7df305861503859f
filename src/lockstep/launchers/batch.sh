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
# The output of Slurm and the ranks. A later start appends to it.
#SBATCH --output={{ quote(batch.log_path) }}
#SBATCH --open-mode=append
# Slurm warns the ranks, not this script, before the time is over (up to a minute earlier, because it rarely checks).
# They finish the step, save and exit with 75.
#SBATCH --signal=USR1@{{ batch.warn_before_s }}
# Allows Slurm to start the job again: after a node failed, and if the end of this script requests it.
#SBATCH --requeue
{% if job.options %}
# --option
#SBATCH {{ join(job.options) }}
{% endif %}

# Since Slurm 22.05, srun does not inherit this setting from the job.
if [ -n "${SLURM_CPUS_PER_TASK:-}" ]; then export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK; fi
# The ranks sign their messages with this secret. Each start draws a new one, so it is in no file or command line.
if [ -z "${ {{- secret }}:-}" ]; then {{ secret }}=$(od -An -v -N32 -tx1 /dev/urandom | tr -d ' \n'); fi
export {{ secret }}
{% if batch.restart_args %}

# The initial checkpoint is only for the first start.
words=()
if [ -e {{ quote(batch.run) }}/config.yaml ]; then words=({{ join(batch.restart_args) }}); fi
{% endif %}

echo "job $SLURM_JOB_ID, start $((${SLURM_RESTART_COUNT:-0} + 1)), on $SLURM_JOB_NODELIST"
size=$(stat --format=%s {{ quote(batch.run ~ "/events.jsonl") }} 2> /dev/null)
# One failed rank ends all ranks. The run folder is named, so that each start continues in it.
{{ call }}{% if batch.restart_args %} "${words[@]}"{% endif %}

code=$?

# The last event of this start shows whether it was stopped by a signal and is saved. The exit code is then 75, unless
# srun kills ranks while they exit, because other ranks have exited. A saved run starts again by itself after the
# warning, and if a different job takes its nodes (Slurm then sends SIGTERM), even if the signal killed it before
# training began. It doesn't start again after scancel, or if somebody has already requeued it. Slurm then doesn't count
# it as running, but would start it if asked to requeue it.
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
            echo "$said: requeued"
            scontrol requeue "$SLURM_JOB_ID" || continue
        fi
        exit "$code"
    done
    echo "$said, but Slurm did not requeue it; to continue:"
    echo "scontrol requeue $SLURM_JOB_ID"
fi
exit "$code"
