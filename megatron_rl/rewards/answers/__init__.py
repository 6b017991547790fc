"""Answers read by kind (numbers, intervals, units, letters, ...) and compared exactly."""
