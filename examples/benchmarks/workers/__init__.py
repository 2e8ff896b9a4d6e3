"""Worker processes of the benchmarks, and the problems, models and systems that they run."""
