"""Many executions of notebooks: `reflib run`, and `reflib compare` of two runs.

    sweep.py     a sweep file (YAML) -> notebooks, and the values of each parameter
    jobs.py      those -> jobs, each checked before anything runs
    cluster.py   where: a Dask cluster; jobs -> outcomes, as they come
    work.py      on a worker: one job -> its outcome
    store.py     a run's folder: outcomes that are kept, and read again
    run.py       all of it, in order
    summary.py   a run's folder -> one HTML page
    compare.py   two runs' rows -> what became slower

    job     = a notebook's text + parameters      its id: slug, and a digest of parameters and code cells
    outcome = status, error, log, notebook as executed, rows, seconds
    run     = runs/<name>/ { run.json, jobs/<id>/ {notebook.ipynb, log.txt, rows.jsonl, result.json}, results.json,
                             summary.html, book/ }

**What is finished.** A job's folder is written beside its place and renamed into it, so it is there whole or not at
all; `result.json` in it says `ok` or `failed`. `--resume` plans the run again, from what run.json says was asked, and
leaves out jobs that are `ok`. Ids come from content: a notebook whose code has changed is another job.

**Where.** One path for one machine and for many: jobs go to a Dask cluster with their notebook's text and come back
with everything as bytes, so no folder is shared. Without `--scheduler` the cluster is in this process, workers are
threads and their messages stay in memory: no port is open to a host's other users. A thread is enough, since each job
has a process of its own (`lab.executing`), which ends with its worker, however the worker ended.

**Timings are not disturbed.** A worker runs one job at a time. There is a worker for each GPU, which offers Dask's
resource `GPU` and is all that its jobs see of the machine's GPUs; jobs on the CPU run one at a time unless `--workers`
says otherwise, and after those on GPUs, never beside them. The summary says how many ran side by side.
"""
