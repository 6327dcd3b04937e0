//! Calls of a driver: the sandbox of one call, what is called with which arguments, and the check of what a container gets.

pub(crate) mod edits;
pub(crate) mod guest_calls;
pub(crate) mod sandbox;
