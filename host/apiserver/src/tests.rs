//! The engine as a client meets it.

mod bounds;
mod client;
mod connections;
mod discovery;
mod durable;
mod ownership;
mod requests;
mod watches;
