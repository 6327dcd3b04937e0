//! The faces to those who ask for devices. A face translates, calls the managers, and knows no driver.

pub mod admin;
pub mod convert;
mod health;
pub mod node_api;
pub mod pod_resources;
pub mod status;
