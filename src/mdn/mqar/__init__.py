"""Multi-query associative recall, the paper's Fig. 4: data, models, trainings side by side on one device."""
