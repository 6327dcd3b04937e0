//! `nodedock driver run`: a daemon with one driver on a temporary root, for its author.
//!
//! The driver's files are copied into the daemon's drivers directory when they change. What the daemon publishes is printed by the node
//! API, as any client sees it.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::Args;
use nodedock_proto::node::v1;
use tokio::sync::mpsc;

use super::compile_cache::CompileCacheArgs;
use super::workbench::SubjectArgs;
use super::{read, write_file};
use nodedock_base::directories;
use nodedock_base::listeners::Listeners;
use nodedock_base::paths::Paths;
use nodedock_base::tasks::Tasks;
use nodedock_base::watched;
use nodedock_command::Location;
use nodedock_command::client::{Client, connect};
use nodedock_command::output::{print_text, printable};
use nodedock_model::limit;
use nodedock_wasm::{CachePaths, file_watch};
use nodedockd::app;
use nodedockd::config::{Config, ConfigFile, Flags};
use nodedockd::telemetry::{self, LogFormat};

/// Time between attempts to connect to the daemon's socket.
const CONNECT_PERIOD: Duration = Duration::from_millis(20);
/// Characters of a digest that are shown.
const DIGEST_SHOWN: usize = "sha256:".len() + 12;

#[derive(Args)]
pub struct RunArgs {
    #[command(flatten)]
    subject: SubjectArgs,
    /// Recorded machine: a directory or a tar file with its /sys [default: this machine]
    #[arg(long, value_name = "SNAPSHOT")]
    hardware: Option<PathBuf>,
    #[command(flatten)]
    cache: CompileCacheArgs,
    /// Form of the log on standard error; NODEDOCK_LOG=info shows more of it
    #[arg(long, value_enum, default_value_t)]
    log_format: LogFormat,
}

pub(super) fn run(args: &RunArgs) -> Result<()> {
    telemetry::init_with(args.log_format, "warn");
    // Removed at the end, when the daemon has ended.
    let root = tempfile::Builder::new()
        .prefix("nodedock-")
        .tempdir()
        .context("make a root for the daemon")?;
    let path = root
        .path()
        .canonicalize()
        .context("find the root of the daemon")?;
    let mut config = Config::new(&path, None, Flags::default(), ConfigFile::default())?;
    let cache = CachePaths::inside(&args.cache.directory(&path));
    (config.paths.cache, config.paths.cache_key) = (cache.directory, cache.key);
    let boot_id = app::boot_id()?;
    if let Some(snapshot) = &args.hardware {
        config.hardware = app::hardware::simulated(snapshot, &config.paths.hardware, &boot_id)?;
    }
    let copies = Copies::new(&args.subject, &config.paths)?;
    copies.bring_up_to_date()?;
    let (listeners, restarts) =
        Listeners::inherited().context("take over the sockets of the process before")?;
    app::directories::set_umask();
    let start = app::Start {
        boot_id,
        listeners,
        restarts,
        is_reported: false.into(),
    };
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .context("start a runtime")?;
    let outcome = runtime.block_on(async {
        let tasks = Tasks::new();
        let outcome = tokio::select! {
            outcome = app::run(config, start) => outcome,
            outcome = copies.follow(&tasks) => outcome,
            () = show(path.clone()) => Ok(()),
        };
        tasks.stop();
        outcome
    });
    runtime.shutdown_timeout(Duration::from_secs(1));
    outcome
}

/// The driver's files, and their copies in the drivers directory. The driver comes last, so that it is not blocked for a moment.
struct Copies(Vec<(PathBuf, PathBuf)>);

impl Copies {
    fn new(subject: &SubjectArgs, paths: &Paths) -> Result<Self> {
        let file = &subject.file;
        let Some(stem) = file.file_name().and_then(file_watch::stem) else {
            bail!(
                "{} is not named NAME.wasm, by which a daemon finds the driver",
                file.display()
            );
        };
        // A missing driver is an error here; later it may be built again.
        read(file, limit::DRIVER_FILE_BYTES_MAX)?;
        // The daemon refuses a directory that the umask opens to others.
        directories::make(&paths.drivers, 0o700)
            .with_context(|| format!("make {}", paths.drivers.display()))?;
        let copy = |given: Option<&PathBuf>, suffix: &str| {
            let from = given
                .cloned()
                .unwrap_or_else(|| file.with_extension(suffix));
            let from =
                std::path::absolute(&from).with_context(|| format!("find {}", from.display()))?;
            anyhow::Ok((from, paths.drivers.join(format!("{stem}.{suffix}"))))
        };
        Ok(Self(vec![
            copy(subject.grant.as_ref(), "grant.yaml")?,
            copy(subject.config.as_ref(), "config.yaml")?,
            copy(Some(file), "wasm")?,
        ]))
    }

    /// Copies what has changed, and removes what is gone.
    fn bring_up_to_date(&self) -> Result<()> {
        for (from, to) in &self.0 {
            if !from.try_exists()? {
                if to.try_exists()? {
                    std::fs::remove_file(to).with_context(|| format!("remove {}", to.display()))?;
                }
                continue;
            }
            let bytes = read(from, limit::DRIVER_FILE_BYTES_MAX)?;
            // no error: it is written then. The same content again would be a new driver.
            if std::fs::read(to).ok().as_ref() != Some(&bytes) {
                write_file(to, &bytes)?;
            }
        }
        Ok(())
    }

    /// Copies the files again whenever one may have changed, without end.
    async fn follow(&self, tasks: &Tasks) -> Result<()> {
        let (reports, mut changes) = mpsc::channel(1);
        let directories: BTreeSet<_> = self
            .0
            .iter()
            .filter_map(|(from, _)| from.parent())
            .collect();
        for directory in directories {
            let work = watched::changes(directory.to_owned(), tasks.child(), reports.clone());
            tasks.spawn_until_stopped("author's files", work);
        }
        drop(reports);
        while changes.recv().await.is_some() {
            // A file that is being written may be gone for a moment: the next change finds it.
            if let Err(error) = self.bring_up_to_date() {
                print_text(&printable(&format!("{error:#}")))?;
            }
        }
        std::future::pending().await
    }
}

/// Prints what the daemon publishes, and each change, without end: the daemon's own outcome counts when it ends.
async fn show(root: PathBuf) {
    if let Err(error) = print_changes(root).await {
        tracing::debug!(error = %format!("{error:#}"), "the node API has ended");
    }
    std::future::pending().await
}

async fn print_changes(root: PathBuf) -> Result<()> {
    let location = Location { root, socket: None };
    let mut timer = tokio::time::interval(CONNECT_PERIOD);
    let mut client = loop {
        timer.tick().await;
        if let Ok(client) = connect(&location).await {
            break client;
        }
    };
    print_text(&hint(&location.root))?;
    let mut events = client.watch(v1::WatchRequest {}).await?.into_inner();
    let mut shown = DaemonStatus::default();
    loop {
        let now = DaemonStatus::read(&mut client).await?;
        for line in now.changes(&shown) {
            print_text(&printable(&line))?;
        }
        shown = now;
        if events.message().await?.is_none() {
            return Ok(());
        }
    }
}

fn hint(root: &Path) -> String {
    format!(
        "root {}; prepare with: nodedock --root {0} prepare --pod demo --device DRIVER/POOL/DEVICE",
        root.display()
    )
}

/// State of the daemon that is printed.
#[derive(Debug, Default, PartialEq, Eq)]
struct DaemonStatus {
    drivers: BTreeSet<String>,
    /// Devices by driver, pool and name: attributes, capacity, health, claims.
    devices: BTreeMap<String, String>,
}

impl DaemonStatus {
    async fn read(client: &mut Client) -> Result<Self> {
        let drivers = client
            .list_drivers(v1::ListDriversRequest::default())
            .await?
            .into_inner()
            .drivers;
        let devices = client
            .list_devices(v1::ListDevicesRequest::default())
            .await?
            .into_inner()
            .devices;
        Ok(Self {
            drivers: drivers.iter().map(driver).collect(),
            devices: devices.iter().map(device).collect(),
        })
    }

    fn changes(&self, before: &Self) -> Vec<String> {
        let mut lines: Vec<_> = self.drivers.difference(&before.drivers).cloned().collect();
        for (name, text) in &self.devices {
            match before.devices.get(name) {
                None => lines.push(format!("+ {name} {text}")),
                Some(other) if other != text => lines.push(format!("~ {name} {text}")),
                Some(_) => {}
            }
        }
        let gone = before
            .devices
            .keys()
            .filter(|name| !self.devices.contains_key(*name));
        lines.extend(gone.map(|name| format!("- {name}")));
        lines
    }
}

fn driver(driver: &v1::Driver) -> String {
    let v1::Driver {
        name,
        source,
        version,
        state,
        reason,
        digest,
        ..
    } = driver;
    let name = if name.is_empty() { source } else { name };
    let digest: String = digest.chars().take(DIGEST_SHOWN).collect();
    let facts = [version.as_str(), &digest]
        .into_iter()
        .filter(|text| !text.is_empty())
        .collect::<Vec<_>>()
        .join(", ");
    let reason = if reason.is_empty() {
        String::new()
    } else {
        format!(": {reason}")
    };
    format!("{name} ({facts}) is {state}{reason}")
}

fn device(device: &v1::Device) -> (String, String) {
    let v1::Device {
        driver,
        pool,
        name,
        attributes_json,
        capacity,
        health,
        claims,
        ..
    } = device;
    let capacity: BTreeMap<_, _> = capacity.iter().collect();
    let mut facts = vec![attributes_json.clone()];
    facts.extend((!capacity.is_empty()).then(|| format!("capacity {capacity:?}")));
    facts.extend((health != "unknown" && !health.is_empty()).then(|| health.clone()));
    facts.extend(
        claims
            .iter()
            .map(|claim| format!("used by {}/{}", claim.namespace, claim.name)),
    );
    (format!("{driver}/{pool}/{name}"), facts.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state(drivers: &[&str], devices: &[(&str, &str)]) -> DaemonStatus {
        let devices = devices
            .iter()
            .map(|(name, text)| ((*name).to_owned(), (*text).to_owned()));
        DaemonStatus {
            drivers: drivers.iter().map(|text| (*text).to_owned()).collect(),
            devices: devices.collect(),
        }
    }

    #[test]
    fn only_what_has_changed_is_printed() {
        let empty = DaemonStatus::default();
        let first = state(&["a is serving"], &[("a/p/x", "{}"), ("a/p/y", "{}")]);
        assert_eq!(
            first.changes(&empty),
            ["a is serving", "+ a/p/x {}", "+ a/p/y {}"]
        );
        assert!(first.changes(&first).is_empty());
        let second = state(&["a is serving"], &[("a/p/x", "{}, unhealthy")]);
        assert_eq!(second.changes(&first), ["~ a/p/x {}, unhealthy", "- a/p/y"]);
    }

    #[test]
    fn a_driver_that_failed_shows_why() {
        let failed = v1::Driver {
            source: "gpu.wasm".into(),
            state: "failed".into(),
            reason: "not WebAssembly".into(),
            digest: "sha256:0123456789abcdef".into(),
            ..Default::default()
        };
        assert_eq!(
            driver(&failed),
            "gpu.wasm (sha256:0123456789ab) is failed: not WebAssembly"
        );
    }

    #[test]
    fn copies_follow_their_files() {
        let home = tempfile::tempdir().unwrap();
        let file = home.path().join("gpu.wasm");
        let paths = Paths::below(&home.path().join("root"));
        let subject = |file: &Path| SubjectArgs {
            file: file.to_owned(),
            grant: None,
            config: None,
        };
        assert!(
            Copies::new(&subject(&file), &paths)
                .err()
                .unwrap()
                .to_string()
                .contains("gpu.wasm")
        );
        std::fs::write(&file, "1").unwrap();
        let unnamed = home.path().join("driver");
        std::fs::write(&unnamed, "1").unwrap();
        let error = Copies::new(&subject(&unnamed), &paths)
            .err()
            .unwrap()
            .to_string();
        assert!(error.contains("driver is not named NAME.wasm"), "{error}");

        std::fs::write(file.with_extension("grant.yaml"), "g").unwrap();
        let copies = Copies::new(&subject(&file), &paths).unwrap();
        copies.bring_up_to_date().unwrap();
        let read = |name: &str| std::fs::read_to_string(paths.drivers.join(name)).ok();
        assert_eq!(
            [
                read("gpu.wasm"),
                read("gpu.grant.yaml"),
                read("gpu.config.yaml")
            ]
            .map(|text| text.unwrap_or_default()),
            ["1", "g", ""]
        );
        std::fs::write(&file, "2").unwrap();
        std::fs::remove_file(file.with_extension("grant.yaml")).unwrap();
        copies.bring_up_to_date().unwrap();
        assert_eq!(
            (read("gpu.wasm").as_deref(), read("gpu.grant.yaml")),
            (Some("2"), None)
        );
    }
}
