"""The monitor: a second, small process per process of a job, which outlives it and never imports jax.

The monitors connect before jax starts, over the coordinator's port, and stay connected: that of process 0 collects the
status of all, decides what went wrong and tells the others. It uses the standard library only, so it starts in
hundredths of a second.

Start with `main.py`; `guard.py` runs in the training process, and may import jax. `rendezvous.py` connects the monitors,
`judge.py` finds the fault, from what `members.py` holds and in the words of `wording.py`. What a process and its monitor
share is in `runtime/channel/`.

A thread in each process with the key-value store of jax's coordination service does not do (jax 0.10.2, three
processes). It names faults of a process that still runs Python in the same words: an exception, late data, a long save,
user code that does not end, an early exit, another program or batch. But it fails where Python no longer runs:

| fault | the monitor | a thread |
|---|---|---|
| SIGKILL, out of memory, `os._exit` of process 1 | died, in the phase of that moment | has not answered, phase 0.25 s old |
| a fatal signal in process 1 | died of Aborted, with the stacks | has not answered |
| SIGSTOP of process 1 | is stopped; is killed | has not answered; process 1 stays |
| native code of process 1 holds the interpreter's lock | holds up the others, user code after step 4 | has not answered |
| SIGKILL or a fatal signal in process 0 | died, in every process | jax aborts 3 of 4 others before they say a word |
| SIGSTOP of process 0 | is stopped | nothing: all calls of the store wait, and the job hangs |
| native code of process 0 holds the lock | holds up the others; is killed | has not answered; process 0 stays |

Neither a heartbeat of 10 s (jax aborts all) nor `jax_enable_recoverability` changes that, and a callback for lost
heartbeats, which jaxlib takes, ends the process with std::bad_cast.
"""
