//! A native device plugin that does everything right, or everything but one thing.
//!
//! The proof of the conformance cases of device plugins: each fault is found by the case that is about it.

use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::{Context, Result};
use clap::{Parser, ValueEnum};
use native_device_plugin::{Choice, Device, Options, Plugin, Script, ScriptedOutcome};
use tokio::signal::unix::{SignalKind, signal};

/// Faults of a plugin; the documentation of its case describes the correct behaviour.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Fault {
    OtherVersion,
    ResourceWithoutDomain,
    RefusesOptions,
    ListsADeviceTwice,
    OtherIdsAtEachStart,
    AnswersForOneContainer,
    OtherAllocationTheSecondTime,
    AllocatesTheUnknown,
    IgnoresWhatMustBeIncluded,
    IgnoresANewKubeletSocket,
}

impl Fault {
    /// The case that finds it.
    fn case(self) -> &'static str {
        match self {
            Self::OtherVersion | Self::ResourceWithoutDomain => "device-plugin.registers",
            Self::RefusesOptions => "device-plugin.options",
            Self::ListsADeviceTwice => "device-plugin.list",
            Self::OtherIdsAtEachStart => "device-plugin.list-stable",
            Self::AnswersForOneContainer => "device-plugin.allocate",
            Self::OtherAllocationTheSecondTime => "device-plugin.allocate-again",
            Self::AllocatesTheUnknown => "device-plugin.allocate-unknown",
            Self::IgnoresWhatMustBeIncluded => "device-plugin.preferred",
            Self::IgnoresANewKubeletSocket => "device-plugin.kubelet-restart",
        }
    }
}

/// A device plugin with devices that do nothing, and with a fault if one is named; with `list` alone it lists the faults
#[derive(Parser)]
struct Args {
    #[arg(long)]
    device_plugins: PathBuf,
    #[arg(long, value_enum)]
    fault: Option<Fault>,
}

#[tokio::main]
async fn main() -> Result<()> {
    if std::env::args().nth(1).as_deref() == Some("list") {
        for fault in Fault::value_variants() {
            let name = fault
                .to_possible_value()
                .context("a fault without a name")?;
            println!("{} {}", name.get_name(), fault.case());
        }
        return Ok(());
    }
    let args = Args::parse();
    let has = |fault| args.fault == Some(fault);
    let mut options = Options::new("faulty.example.com/device", &args.device_plugins);
    options.said_version = has(Fault::OtherVersion).then(|| "v1alpha".to_owned());
    options.said_resource = has(Fault::ResourceWithoutDomain).then(|| "device".to_owned());
    let part = if has(Fault::OtherIdsAtEachStart) {
        format!("{}-", std::process::id())
    } else {
        String::new()
    };
    let ids = [0, 1, 2].map(|index| format!("device-{part}{index}"));
    let plugin = Plugin::unregistered(options, script(args.fault, ids.to_vec()))
        .context("make the socket")?;
    let again = has(Fault::ListsADeviceTwice).then(|| ids[0].clone());
    plugin.list(
        ids.iter()
            .chain(&again)
            .map(|id| Device::healthy(id))
            .collect(),
    );
    let mut terminate = signal(SignalKind::terminate())?;
    tokio::select! {
        registered = registered(&plugin, has(Fault::IgnoresANewKubeletSocket)) => registered?,
        _ = terminate.recv() => {}
    }
    plugin.remove_sockets().context("remove the sockets")
}

async fn registered(plugin: &Plugin, once: bool) -> Result<()> {
    if once {
        plugin.register().await.context("register")?;
        std::future::pending::<()>().await;
    }
    plugin.keep_registered().await.context("stay registered")
}

fn script(fault: Option<Fault>, listed: Vec<String>) -> Script {
    let allocations = AtomicUsize::new(0);
    let script = Script::new(move |ids| match fault {
        Some(Fault::AllocatesTheUnknown) => ScriptedOutcome::ok(ids),
        _ if !ids.iter().all(|id| listed.contains(id)) => {
            ScriptedOutcome::refuse("a device is not listed")
        }
        Some(Fault::AnswersForOneContainer) if !ids.contains(&listed[0]) => {
            ScriptedOutcome::NoResponse
        }
        Some(Fault::OtherAllocationTheSecondTime) => {
            ScriptedOutcome::ok(&[allocations.fetch_add(1, Ordering::SeqCst).to_string()])
        }
        _ => ScriptedOutcome::ok(ids),
    });
    let script = script.choose(move |choice: &Choice| {
        let must = choice
            .must_include
            .iter()
            .filter(|_| fault != Some(Fault::IgnoresWhatMustBeIncluded));
        let others = choice
            .available
            .iter()
            .filter(|id| !choice.must_include.contains(id));
        let size = usize::try_from(choice.size).unwrap_or_default();
        must.chain(others).take(size).cloned().collect()
    });
    match fault {
        Some(Fault::RefusesOptions) => script.options(ScriptedOutcome::refuse("not today")),
        _ => script,
    }
}
