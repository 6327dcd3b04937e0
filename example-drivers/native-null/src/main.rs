//! A native DRA plugin without hardware, as a program.

use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::Parser;
use native_null::{Event, Options, Plugin, Script, Versions};

/// A native DRA plugin without hardware: prepares every claim with one device, null/null-0
#[derive(Parser)]
struct Args {
    /// Name of the driver
    #[arg(long, default_value = "null.example.com")]
    driver: String,
    /// The directory of registration sockets that the node's agent watches
    #[arg(long, default_value = "/var/lib/nodedock/plugins_registry")]
    registry_dir: PathBuf,
    /// The directory for the driver's socket, DRIVER/dra.sock
    #[arg(long, default_value = "/var/lib/nodedock/plugins")]
    plugins_dir: PathBuf,
    /// Name of this instance, for a rolling update
    #[arg(long)]
    instance: Option<String>,
    /// Serve v1beta1 only
    #[arg(long)]
    old: bool,
}

#[tokio::main]
async fn main() -> Result<()> {
    let args = Args::parse();
    let mut options = Options::new(&args.driver, &args.registry_dir, &args.plugins_dir);
    options.versions = Versions {
        v1: !args.old,
        ..Versions::default()
    };
    if let Some(instance) = &args.instance {
        options = options.instance(instance);
    }
    let script = Script::ok(&args.driver);
    let plugin = Plugin::start(options, script)
        .await
        .context("make the sockets")?;
    eprintln!(
        "native-null: waits on {}",
        plugin.registration_socket().display()
    );
    loop {
        tokio::select! {
            event = plugin.event() => say(&event),
            stopped = tokio::signal::ctrl_c() => {
                stopped.context("wait for the signal")?;
                break;
            }
        }
    }
    // A plugin that stops cleanly removes its sockets.
    plugin
        .unregister()
        .context("remove the registration socket")?;
    std::fs::remove_file(plugin.endpoint()).context("remove the driver's socket")
}

fn say(event: &Event) {
    match event {
        Event::Asked => eprintln!("native-null: GetInfo was called"),
        Event::Notified(true, _) => eprintln!("native-null: registered"),
        Event::Notified(false, why) => eprintln!("native-null: not registered: {why}"),
        Event::Called {
            operation, claims, ..
        } => {
            let claims: Vec<_> = claims
                .iter()
                .map(|claim| format!("{}/{}", claim.namespace, claim.name))
                .collect();
            eprintln!("native-null: {operation:?} {}", claims.join(", "));
        }
        Event::HealthWatched(version) => {
            eprintln!("native-null: its health is watched ({version})")
        }
    }
}
