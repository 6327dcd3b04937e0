//! The engine as a client meets it.

mod bounds;
mod client;
mod connections;
mod discovery;
mod durable;
mod ownership;
mod parameters;
mod requests;
mod watches;
