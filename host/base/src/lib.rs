//! Shared basics: tasks and drain, time, backoff, locks by key, Unix sockets, directories, error chains, conditions, counters, fail points.

pub mod backoff;
pub mod batches;
pub mod beneath;
pub mod changes;
pub mod clock;
pub mod conditions;
pub mod descriptors;
pub mod device_plugin_sockets;
pub mod error;
pub mod failpoint;
pub mod file;
pub mod grpc;
pub mod listeners;
pub mod locks;
pub mod memory;
pub mod metrics;
pub mod printable;
pub mod process;
pub mod rate;
pub mod request;
pub mod socket;
pub mod tasks;
pub mod users;
pub mod watched;
mod words;
