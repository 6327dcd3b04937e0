//! Other people's software against the real daemon, and against the sockets that drivers in Rust make.

mod allocations;
mod cdi_files;
mod device_attributes;
mod device_metadata;
mod device_plugin;
mod dra_driver;
mod kubelet;
mod local_api;
mod metrics;
mod node_api;
mod pod_resources;
mod policy;
mod programs;
mod protobuf;
mod registration;
mod selectors;

use std::path::Path;
use std::process::Stdio;

use nodedock_tests::DEADLINE;
use tokio::process::Command;

/// Runs a program to its end and returns its output by line. The program has to succeed.
async fn lines(program: &Path, args: &[&str]) -> Vec<String> {
    let mut command = Command::new(program);
    command.args(args).stdin(Stdio::null()).kill_on_drop(true);
    let output = tokio::time::timeout(DEADLINE, command.output()).await;
    let output = output.unwrap_or_else(|_| panic!("{} {args:?} does not end", program.display()));
    let output = output.unwrap_or_else(|error| panic!("start {}: {error}", program.display()));
    assert!(
        output.status.success(),
        "{} {args:?}: {output:?}",
        program.display()
    );
    String::from_utf8(output.stdout)
        .expect("UTF-8")
        .lines()
        .map(str::to_owned)
        .collect()
}
