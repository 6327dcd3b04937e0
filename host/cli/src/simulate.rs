//! `nodedock simulate`: virtual nodes for tests of a cluster.

use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::Args;
use nodedock_kube::client::RequestRate;
use nodedock_model::limit;

use super::CommandError;
use crate::virtual_nodes::{self, Options};
use nodedockd::app::Signals;
use nodedockd::telemetry::{self, LogFormat};

/// Nodes of one process.
const NODES_MAX: u32 = 10_000;
/// Requests per second, unless another number is given.
const RATE: u32 = 100;

#[derive(Args)]
pub(super) struct SimulateArgs {
    /// Number of virtual nodes
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=i64::from(NODES_MAX)))]
    nodes: u32,
    /// Recorded machine of the nodes: a directory or a tar file with its /sys; nodes have several in turn
    #[arg(long, required = true, value_name = "SNAPSHOT")]
    hardware: Vec<PathBuf>,
    /// Directory with NAME.wasm, NAME.grant.yaml and NAME.config.yaml of every driver
    #[arg(long, value_name = "DIR")]
    drivers: PathBuf,
    /// Kubeconfig of the API server
    #[arg(long, value_name = "FILE")]
    kubeconfig: PathBuf,
    /// Names of the nodes: PREFIX-0, PREFIX-1, ...
    #[arg(long, default_value = "virtual", value_name = "PREFIX")]
    name_prefix: String,
    /// Faults of devices by time, in YAML
    #[arg(long, value_name = "FILE")]
    faults: Option<PathBuf>,
    /// Requests per second to the API server
    #[arg(long, default_value_t = RATE, value_parser = clap::value_parser!(u32).range(1..=i64::from(limit::API_PER_SECOND_MAX)))]
    requests_per_second: u32,
    /// Create no nodes; slices of a node are published when it exists
    #[arg(long)]
    existing_nodes: bool,
    /// End when all slices are published; they stay
    #[arg(long, conflicts_with = "faults")]
    until_published: bool,
    /// Form of the log on standard error
    #[arg(long, value_enum, default_value_t)]
    log_format: LogFormat,
}

pub(super) fn run(args: SimulateArgs) -> Result<()> {
    telemetry::init_with(args.log_format, "warn");
    if args.name_prefix.is_empty() {
        return Err(CommandError::usage(
            "--name-prefix is empty",
            "the nodes are PREFIX-0, PREFIX-1, ...",
        )
        .into());
    }
    let options = Options {
        prefix: args.name_prefix,
        nodes: args.nodes as usize,
        snapshots: args.hardware,
        drivers: args.drivers,
        kubeconfig: args.kubeconfig,
        faults: args.faults,
        rate: RequestRate {
            per_second: args.requests_per_second,
            burst: args
                .requests_per_second
                .saturating_mul(2)
                .min(limit::API_BURST_MAX),
        },
        creates_nodes: !args.existing_nodes,
        ends_when_published: args.until_published,
    };
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .context("start a runtime")?;
    runtime.block_on(async {
        let mut signals = Signals::new()?;
        tokio::select! {
            // Slices that are written stay, and the next start finds the others.
            () = signals.received() => Ok(()),
            ended = virtual_nodes::run(options) => ended,
        }
    })
}
