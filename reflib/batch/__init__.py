"""Executes many notebooks: `reflib run`, and `reflib compare` for two runs.

    sweep.py     a sweep file (YAML) -> notebooks, and the values of each parameter
    jobs.py      those -> jobs, all checked before the first one runs
    cluster.py   a Dask cluster; jobs -> outcomes, in order of completion
    work.py      on a worker: one job -> its outcome
    store.py     a run's folder: stores and loads outcomes
    run.py       calls these in order
    record.py    `reflib record`: executes chapters and writes their outputs back
    summary.py   a run's folder -> one HTML page
    compare.py   two runs' rows -> differences in time
    artifacts.py what failed -> a folder for CI: why, and traces and repros of running it again

    job     = a notebook's text + parameters      its id: slug, and a hash of parameters and code cells
    outcome = status, error, log, executed notebook, rows, seconds
    run     = runs/<name>/ { run.json, jobs/<id>/ {notebook.ipynb, log.txt, rows.jsonl, result.json}, results.json,
                             summary.html, book/ }

**Finished jobs.** A job's folder is written under a temporary name and renamed, so it is complete or absent; the status
in `result.json` is `ok` or `failed`. `--resume` plans the run again from the request in run.json and skips jobs with
status `ok`. Ids depend on content: a notebook with changed code is another job.

**Where jobs run.** One code path for one machine and for several: a job is sent to a Dask cluster with its notebook's
text, and all results come back as bytes, so no folder is shared. Without `--scheduler` the cluster is in this process,
with threads as workers and messages in memory: no port is open to other users of the host. Threads suffice because each
job has its own process (`lab.executing`), which ends when its worker ends for any reason.

**Undisturbed timings.** A worker runs one job at a time. There is one worker per GPU, with Dask's resource `GPU`; its
jobs see only that GPU. Jobs on the CPU run one at a time (more with `--workers`), after those on GPUs. The summary
states how many jobs ran at the same time.
"""
