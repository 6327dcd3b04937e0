//! The faces to those who ask for devices. A face translates, calls the managers, and knows no driver.

pub mod admin;
pub mod bridge;
pub mod convert;
mod health;
pub mod kube;
pub mod node_api;
pub mod pod_resources;
pub mod status;
