//! Limits of calls: permits, processors, memory, and the failure of a call that reached one.

pub(crate) mod call_failure;
pub(crate) mod concurrency;
pub(crate) mod executor;
pub(crate) mod limiter;
