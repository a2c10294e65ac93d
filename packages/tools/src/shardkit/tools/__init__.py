"""Before, during and after a run: estimate, plan, profile, report, doctor and watch, and the `shardkit` command."""
