"""When fragments are sent and applied, and how long a round is: pure functions, without a clock."""
