"""Pipeline parallelism.

    schedule.py   schedules as data: which rank runs which ops, in which order
    executor.py   runs this rank's ops of a schedule
"""
