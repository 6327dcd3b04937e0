//! What every module stands on: tasks with a name and an end, drain, time, Unix sockets, error chains, telemetry.

pub mod changes;
pub mod clock;
pub mod error;
pub mod socket;
pub mod tasks;
pub mod telemetry;
