//! Against the recordings, and the rest as a client meets it.

mod behaviour;
mod client;
mod recorded;
