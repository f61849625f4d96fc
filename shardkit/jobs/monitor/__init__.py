"""The monitor: a second, small process per process of a job, which outlives it and never imports jax.

The monitors connect before jax starts, over the coordinator's port, and stay connected: that of process 0 collects the
status of all, decides what went wrong and tells the others. It uses the standard library only, so it starts in
hundredths of a second.

Start with `main.py`. `rendezvous.py` connects the monitors, which introduce themselves by `introduction.py`. `judge.py`
finds the fault, from what `members.py` holds and in the words of `wording.py`. What a process and its monitor share is
in `runtime/channel/`.

`guard.py` runs in the training process, and may import jax. There `agreement.py` compares the program of a step, as
`fingerprint.py` describes it, with those of the other processes, over jax's coordination service, and tells the monitor
what differs.

A thread in each process, over the key-value store of jax's coordination service, is not enough (jax 0.10.2, three
processes). It names the faults of a process that still runs Python in the same words: an exception, late data, a long
save, user code that does not end, an early exit, another program or batch. It fails where Python no longer runs:

| fault | the monitors say | threads say |
|---|---|---|
| SIGKILL or `os._exit` of process 1 | died, in user code after step 4 | has not answered, in a phase before |
| a fatal signal in process 1 | died of Aborted; the stacks | has not answered |
| SIGSTOP of process 1 | is stopped; it is killed | has not answered; it stays |
| process 1 in native code that keeps Python's lock | holds up the others; it is killed | has not answered |
| SIGKILL or a fatal signal of process 0 | died, in all processes | nothing in 11 of 16: jax aborts them before |
| SIGSTOP of process 0 | is stopped; it is killed | nothing: each call of the store waits, the job hangs |
| process 0 in native code that keeps Python's lock | holds up the others; it is killed | has not answered; it stays |

Neither a heartbeat of 10 s, after which jax aborts all, nor `jax_enable_recoverability` helps; with a callback for lost
heartbeats, which jaxlib takes, the process ends with std::bad_cast.
"""
