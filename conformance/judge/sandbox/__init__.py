"""Protection of the judge and its process from the subject.

trial                               import of a subject in a separate process, before the suite depends on it
deadlines watchdog                  deadlines of tests, and the end of tests that exceed them
process_state global_state          state of the process and of torch that a test must leave as it was
notes                               notes of workers that outlive them
seeding environment                 seeds, devices and the machine
marked_processes                    processes that a command has started
"""
