"""Pipeline parallelism.

    schedule.py   schedules as data: which rank runs what, in which order
    executor.py   runs this rank's ops of a schedule
"""
