//! Tests against the recordings, and tests of everything else as a client sees it.

mod behaviour;
mod client;
mod recorded;
