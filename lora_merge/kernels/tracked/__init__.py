"""Merges in place that come back bit for bit: `plan.TrackedPlan`, and the forms that backends build it from."""
