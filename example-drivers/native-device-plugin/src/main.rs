//! A native device plugin without hardware, as a program.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result};
use clap::{Parser, ValueEnum};
use native_device_plugin::{
    Choice, Device, Event, Options, Plugin, Register, Script, ScriptedOutcome,
};
use notify::{RecursiveMode, Watcher};
use serde::Deserialize;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{Notify, mpsc};

/// Delay of a late answer: longer than any caller waits.
const LATE: Duration = Duration::from_secs(60);

/// A native device plugin without hardware: lists devices and gives each container the variable NATIVE_DEVICES
///
/// Writes its events to standard output, one JSON object per line.
#[derive(Parser)]
struct Args {
    /// The extended resource
    #[arg(long, default_value = "null.example.com/device")]
    resource: String,
    /// The directory with kubelet.sock; the plugin creates its socket there
    #[arg(long, default_value = "/var/lib/nodedock/device-plugins")]
    device_plugins_dir: PathBuf,
    /// The directory of registration sockets, for --register plugins-registry
    #[arg(long, default_value = "/var/lib/nodedock/plugins_registry")]
    registry_dir: PathBuf,
    /// The way to register
    #[arg(long, value_enum, default_value_t = Way::KubeletSocket)]
    register: Way,
    /// YAML list of devices, each {id, healthy, numaNodes}; read again when it changes. Default: device-0 and device-1
    #[arg(long)]
    devices: Option<PathBuf>,
    /// YAML mapping from a device to the outcome of an Allocate with it: ok, refuse, hang, no-response, bad-path or late
    #[arg(long)]
    answers: Option<PathBuf>,
    /// Request a call before each start of a container
    #[arg(long)]
    pre_start: bool,
    /// Offer preferred allocation: the first or the last of the available devices
    #[arg(long, value_enum)]
    prefer: Option<Prefer>,
}

#[derive(Clone, Copy, PartialEq, ValueEnum)]
enum Way {
    KubeletSocket,
    PluginsRegistry,
}

#[derive(Clone, Copy, ValueEnum)]
enum Prefer {
    First,
    Last,
}

#[derive(Clone, Copy, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum OutcomeName {
    Ok,
    Refuse,
    Hang,
    NoResponse,
    BadPath,
    Late,
}

#[tokio::main]
async fn main() -> Result<()> {
    let args = Args::parse();
    let mut options = Options::new(&args.resource, &args.device_plugins_dir);
    options.pre_start = args.pre_start;
    if args.register == Way::PluginsRegistry {
        options.register = Register::PluginsRegistry(args.registry_dir.clone());
    }
    let answers = args
        .answers
        .as_deref()
        .map(read)
        .transpose()?
        .unwrap_or_default();
    let now = devices(args.devices.as_deref())?;
    let listed = Arc::new(Mutex::new(ids(&now)));
    let script = script(answers, args.prefer, listed.clone());
    let plugin = Plugin::unregistered(options, script).context("make the socket")?;
    plugin.list(now.clone());
    let mut terminate = signal(SignalKind::terminate()).context("listen for SIGTERM")?;
    tokio::select! {
        registered = plugin.keep_registered() => registered.context("register")?,
        followed = follow(&plugin, args.devices.as_deref(), now, &listed) => followed?,
        () = say(&plugin) => {}
        stopped = tokio::signal::ctrl_c() => stopped.context("wait for the signal")?,
        _ = terminate.recv() => {}
    }
    // A plugin that stops cleanly removes its sockets.
    plugin.remove_sockets().context("remove the sockets")
}

fn read<T: serde::de::DeserializeOwned>(file: &Path) -> Result<T> {
    let text = std::fs::read_to_string(file).with_context(|| format!("read {}", file.display()))?;
    serde_saphyr::from_str(&text).with_context(|| format!("{} is not valid", file.display()))
}

fn devices(file: Option<&Path>) -> Result<Vec<Device>> {
    file.map_or_else(
        || {
            Ok(vec![
                Device::healthy("device-0"),
                Device::healthy("device-1"),
            ])
        },
        read,
    )
}

/// IDs of the devices that are listed now.
type Listed = Arc<Mutex<BTreeSet<String>>>;

fn ids(devices: &[Device]) -> BTreeSet<String> {
    devices.iter().map(|device| device.id.clone()).collect()
}

/// A device that is not listed is refused; of the others, the first with an entry in the answers decides.
fn script(
    answers: BTreeMap<String, OutcomeName>,
    prefer: Option<Prefer>,
    listed: Listed,
) -> Script {
    let script = Script::new(move |ids| match ids.iter().find_map(|id| answers.get(id)) {
        _ if ids.iter().any(|id| !is_listed(&listed, id)) => {
            ScriptedOutcome::refuse("a device is not listed")
        }
        None | Some(OutcomeName::Ok) => ScriptedOutcome::ok(ids),
        Some(OutcomeName::Refuse) => ScriptedOutcome::refuse("refused by --answers"),
        Some(OutcomeName::Hang) => ScriptedOutcome::Hang,
        Some(OutcomeName::NoResponse) => ScriptedOutcome::NoResponse,
        Some(OutcomeName::BadPath) => ScriptedOutcome::bad_path(),
        Some(OutcomeName::Late) => late(ids),
    });
    match prefer {
        None => script,
        Some(prefer) => script.choose(move |choice| chosen(prefer, choice)),
    }
}

fn is_listed(listed: &Listed, id: &String) -> bool {
    listed
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .contains(id)
}

fn late(ids: &[String]) -> ScriptedOutcome {
    let due = Arc::new(Notify::new());
    let notify = due.clone();
    tokio::spawn(async move {
        tokio::time::sleep(LATE).await;
        notify.notify_one();
    });
    ScriptedOutcome::After(due, Box::new(ScriptedOutcome::ok(ids)))
}

fn chosen(prefer: Prefer, choice: &Choice) -> Vec<String> {
    let mut chosen = choice.must_include.clone();
    let size = usize::try_from(choice.size).unwrap_or_default();
    let others = choice
        .available
        .iter()
        .filter(|id| !choice.must_include.contains(id))
        .cloned();
    match prefer {
        Prefer::First => chosen.extend(others),
        Prefer::Last => chosen.extend(others.rev()),
    }
    chosen.truncate(size);
    chosen
}

/// Lists the devices again when their file changes. Reports and skips an invalid file.
async fn follow(
    plugin: &Plugin,
    file: Option<&Path>,
    mut last: Vec<Device>,
    listed: &Mutex<BTreeSet<String>>,
) -> Result<()> {
    let Some(file) = file else {
        return std::future::pending().await;
    };
    let (sender, mut changes) = mpsc::channel(1);
    // A full channel triggers a check as well as a new event does.
    let mut watcher = notify::recommended_watcher(move |event: notify::Result<notify::Event>| {
        if !event.is_ok_and(|event| event.kind.is_access() && !is_written(&event.kind)) {
            let _ = sender.try_send(());
        }
    })?;
    // Watches the directory, because editors replace the file.
    let directory = file
        .parent()
        .filter(|directory| !directory.as_os_str().is_empty())
        .unwrap_or(Path::new("."));
    watcher
        .watch(directory, RecursiveMode::NonRecursive)
        .context("watch the devices' file")?;
    loop {
        match devices(Some(file)) {
            Ok(now) if now == last => {}
            Ok(now) => {
                *listed.lock().unwrap_or_else(PoisonError::into_inner) = ids(&now);
                plugin.list(now.clone());
                last = now;
            }
            Err(error) => eprintln!("native-device-plugin: {error:#}"),
        }
        if changes.recv().await.is_none() {
            return Ok(());
        }
    }
}

fn is_written(kind: &notify::EventKind) -> bool {
    use notify::event::{AccessKind, AccessMode, EventKind};
    matches!(
        kind,
        EventKind::Access(AccessKind::Close(AccessMode::Write))
    )
}

async fn say(plugin: &Plugin) {
    loop {
        let event: Event = plugin.event().await;
        if let Ok(line) = serde_json::to_string(&event) {
            println!("{line}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ids(ids: &[&str]) -> Vec<String> {
        ids.iter().map(|id| (*id).to_owned()).collect()
    }

    #[test]
    fn preference_includes_required_ids() {
        let choice = Choice {
            available: ids(&["a", "b", "c", "d"]),
            must_include: ids(&["c"]),
            size: 2,
        };
        assert_eq!(chosen(Prefer::First, &choice), ["c", "a"]);
        assert_eq!(chosen(Prefer::Last, &choice), ["c", "d"]);
        let negative = Choice { size: -1, ..choice };
        assert_eq!(chosen(Prefer::First, &negative), ids(&[]));
    }

    #[test]
    fn device_and_answer_files_are_validated() {
        let dir = tempfile::tempdir().unwrap();
        let file = |text: &str| {
            let path = dir.path().join("file.yaml");
            std::fs::write(&path, text).unwrap();
            path
        };
        let listed = devices(Some(&file(
            "- {id: a, numaNodes: [1]}\n- {id: b, healthy: false}\n",
        )))
        .unwrap();
        assert_eq!(
            listed,
            [Device::healthy("a").on(&[1]), Device::unhealthy("b")]
        );
        let wrong = devices(Some(&file("- {id: a, health: Healthy}\n"))).unwrap_err();
        assert!(
            format!("{wrong:#}").contains("file.yaml is not valid"),
            "{wrong:#}"
        );
        let answers: BTreeMap<String, OutcomeName> =
            read(&file("a: no-response\nb: bad-path\n")).unwrap();
        assert!(
            matches!(answers["a"], OutcomeName::NoResponse)
                && matches!(answers["b"], OutcomeName::BadPath)
        );
        assert!(read::<BTreeMap<String, OutcomeName>>(&file("a: sometimes\n")).is_err());
    }

    #[test]
    fn first_device_with_an_answer_decides() {
        let answers = BTreeMap::from([
            ("b".to_owned(), OutcomeName::Refuse),
            ("c".to_owned(), OutcomeName::Hang),
        ]);
        let listed = Arc::new(Mutex::new(BTreeSet::from(
            ["a", "b", "c"].map(str::to_owned),
        )));
        let script = script(answers, None, listed);
        assert!(matches!(
            script.answer(&ids(&["a", "b", "c"])),
            ScriptedOutcome::Status(..)
        ));
        assert!(matches!(
            script.answer(&ids(&["a"])),
            ScriptedOutcome::Container(_)
        ));
        assert!(
            matches!(script.answer(&ids(&["d"])), ScriptedOutcome::Status(..)),
            "it is not listed"
        );
    }
}
