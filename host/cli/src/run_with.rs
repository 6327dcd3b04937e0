//! `nodedock run-with`: runs a program, such as a container tool, with exclusive devices.
//!
//! The claim belongs to this process and to the program: when both have ended, in any way, the daemon unprepares and deletes it. Processes
//! that the program leaves behind, such as the monitor of a container, become children of this process, which waits for them. Signals that
//! end a program are forwarded as they come, except those that its terminal sends to both.

use std::ffi::OsString;
use std::future::poll_fn;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::task::Poll;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::Args;
use futures::FutureExt;
use nodedock_kube::client::ErrorKind;
use nodedock_kube::local::annotation_of;
use rustix::process::{
    Pid, Signal, WaitOptions, getpgid, getpgrp, getpid, kill_process, set_child_subreaper, wait,
};
use serde_json::{Value, json};
use tokio::signal::unix::{SignalKind, signal};
use tokio::time::{Instant, sleep};

use super::completion::Named;
use super::local_api::{connect, namespace};
use super::output::print_error;
use super::owned_claim::{
    DAEMON_RETRY, DAEMON_WAIT, DeviceWait, NewClaim, OwnedClaim, PreparedDevices, new_name,
};
use super::{CommandError, Location, container, files};
use nodedock_base::process::Process;

/// Tools that take `--device CDI-NAME` behind the command that runs a container.
const TOOLS: [&str; 3] = ["podman", "docker", "nerdctl"];
const TOOL_COMMAND: &str = "run";
/// A word before this command that changes nothing, and words with which containers start later, or get their devices elsewhere.
const CONTAINER: &str = "container";
const OTHERS: [&str; 3] = ["compose", "create", "start"];

/// Placeholder for the devices in the arguments of other programs.
const PLACEHOLDER: &str = "{cdi}";
/// The devices in the environment of every program, separated by commas.
const VARIABLE: &str = "NODEDOCK_CDI_DEVICES";

/// Exit codes as container tools have them: of a failure of this program, of a program that cannot be executed, and of one that is not there; and the
/// least one of a program that a signal ended.
pub(super) const FAILED: u8 = 125;
const NOT_EXECUTABLE: u8 = 126;
const NOT_FOUND: u8 = 127;
const OF_SIGNALS: i32 = 128;

#[derive(Args)]
pub(super) struct RunWithArgs {
    /// DeviceClass of a device, or of N devices; may be given several times
    #[arg(long, value_name = "NAME[=N]", required_unless_present = "filename", value_parser = class_count, add = Named::Classes.candidates())]
    class: Vec<ClassCount>,
    /// Number of devices of each class without one
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=32))]
    count: u32,
    /// CEL expression that each device has to fulfil, such as 'device.capacity["gpu.example.com"].memory.compareTo(quantity("40Gi")) >= 0'; may be given several times
    #[arg(long, value_name = "EXPRESSION")]
    select: Vec<String>,
    /// A ResourceClaim as Kubernetes YAML or JSON, in place of classes
    #[arg(short, long, value_name = "FILE", conflicts_with_all = ["class", "count", "select"])]
    filename: Option<PathBuf>,
    /// Name of the claim [default: that of the file, or a new one]
    #[arg(long, value_name = "NAME")]
    name: Option<String>,
    /// Namespace of the claim [default: that of the file, or default; for users other than root user-UID]
    #[arg(short, long, value_name = "NAME")]
    namespace: Option<String>,
    /// Seconds to wait for the devices [default: as long as it takes]
    #[arg(long, value_name = "SECONDS")]
    timeout: Option<u64>,
    /// Wait also for what the machine does not have now: a class that does not exist, or devices that no selector matches
    #[arg(long)]
    wait_for_missing: bool,
    /// The program with its arguments. podman, docker and nerdctl get --device, also behind programs such as sudo; in others {cdi} is replaced by the devices
    #[arg(last = true, required = true, value_name = "PROGRAM")]
    program: Vec<OsString>,
}

/// A DeviceClass, and the number of devices if it is given.
type ClassCount = (String, Option<u32>);

fn class_count(text: &str) -> Result<ClassCount, String> {
    let Some((class, count)) = text.split_once('=') else {
        return Ok((text.to_owned(), None));
    };
    match count.parse() {
        Ok(count @ 1..=32) => Ok((class.to_owned(), Some(count))),
        _ => Err(format!("{count:?} is no number of devices from 1 to 32")),
    }
}

#[derive(Args)]
pub(super) struct HoldArgs {
    namespace: String,
    claim: String,
    uid: String,
    #[arg(last = true, required = true)]
    program: Vec<OsString>,
}

pub(super) async fn run(location: &Location, args: RunWithArgs) -> Result<()> {
    // Before anything is made: what cannot be started has no use for a device.
    with_devices(&args.program, &[])?;
    let process = Process::this().context("identify this process")?;
    let (namespace, new) = new_claim(location, &args, &process)?;
    let client = connect(location).await?;
    let mut signals = StopSignals::new()?;
    let claim = OwnedClaim::make(&client, &namespace, new, DAEMON_WAIT).await?;
    let wait = DeviceWait {
        most: args.timeout.map(Duration::from_secs),
        report: print_error,
        daemon: DAEMON_WAIT,
        waits_for_missing: args.wait_for_missing,
    };
    let prepared = tokio::select! {
        prepared = claim.prepare(location, None, wait) => prepared,
        signal = signals.received() => {
            Err(CommandError::Ended { code: exit_code(OF_SIGNALS + signal.as_raw()) }.into())
        }
    };
    let mut own = vec![process.pid];
    let ended = match prepared {
        Ok(prepared) => run_program(location, &args, &claim, &prepared, signals, &mut own).await,
        Err(error) => Err(error),
    };
    match claim.has_others(&client, &own).await {
        // The daemon ends it with the last container.
        Ok(true) => {}
        Ok(false) => claim.end(location, &client).await,
        Err(error) => print_error(&format!(
            "warning: the daemon ends claim {}: {error:#}",
            claim.name()
        )),
    }
    match ended? {
        0 => Ok(()),
        code => Err(CommandError::Ended { code }.into()),
    }
}

/// Returns the claim of the arguments, and its namespace.
fn new_claim(
    location: &Location,
    args: &RunWithArgs,
    process: &Process,
) -> Result<(String, NewClaim)> {
    let file = args
        .filename
        .as_deref()
        .map(claim_of)
        .transpose()?
        .unwrap_or_default();
    let metadata = &file["metadata"];
    let given = |argument: &Option<String>, field: &str| {
        let of_file = metadata[field].as_str().map(str::to_owned);
        argument.clone().or(of_file)
    };
    let mut annotations = vec![annotation_of(process)];
    for (key, value) in metadata["annotations"].as_object().into_iter().flatten() {
        annotations.extend(value.as_str().map(|value| (key.clone(), value.to_owned())));
    }
    let claim = NewClaim {
        name: given(&args.name, "name").unwrap_or_else(|| new_name("run-with")),
        annotations,
        labels: metadata["labels"].clone(),
        spec: if file.is_null() {
            spec_of(args)
        } else {
            file["spec"].clone()
        },
    };
    Ok((
        given(&args.namespace, "namespace").unwrap_or_else(|| namespace(location)),
        claim,
    ))
}

/// Returns the claim of a file, which has no other object.
fn claim_of(path: &Path) -> Result<Value> {
    let mut objects = files::objects(&[path.to_owned()])?;
    files::check_fields(&objects)?;
    match (objects.pop(), objects.is_empty()) {
        (Some((_, claim)), true) if claim["kind"] == "ResourceClaim" => Ok(claim),
        _ => bail!("{} is not one ResourceClaim", path.display()),
    }
}

fn spec_of(args: &RunWithArgs) -> Value {
    let selectors: Vec<_> = args
        .select
        .iter()
        .map(|expression| json!({ "cel": { "expression": expression } }))
        .collect();
    let requests = args
        .class
        .iter()
        .enumerate()
        .map(|(number, (class, count))| {
            json!({
                "name": format!("devices-{number}"),
                "exactly": {
                    "deviceClassName": class, "allocationMode": "ExactCount",
                    "count": count.unwrap_or(args.count), "selectors": selectors,
                },
            })
        });
    json!({ "devices": { "requests": requests.collect::<Vec<_>>() } })
}

/// Runs the program, and waits for it and, unless it is a container tool, for what it left behind. Returns its exit code, and adds its number to
/// `own`.
async fn run_program(
    location: &Location,
    args: &RunWithArgs,
    claim: &OwnedClaim,
    prepared: &PreparedDevices,
    mut signals: StopSignals,
    own: &mut Vec<i32>,
) -> Result<u8> {
    set_child_subreaper(Some(getpid()))
        .context("become the parent of what the program leaves behind")?;
    let mut program = Command::new(std::env::current_exe().context("find this program")?);
    program.arg("--root").arg(&location.root);
    if let Some(socket) = &location.socket {
        program.arg("--socket").arg(socket);
    }
    program.arg("internal-hold");
    program.args([
        claim.id.namespace.as_str(),
        claim.id.name.as_str(),
        claim.id.uid.as_str(),
        "--",
    ]);
    let devices = &prepared.names;
    program
        .args(with_devices(&args.program, devices)?)
        .env(VARIABLE, devices.join(","));
    // The claim follows the containers of a container tool, which leaves processes of its own behind.
    let is_tool = tool_at(&args.program)?.is_some();
    if !is_tool {
        // A program that runs outside a container has the nodes already, and not the variables.
        let edits = container::edits(prepared)?;
        program.envs(edits.into_iter().flat_map(|edits| edits.env));
    }
    if let Some(signal) = signals.received().now_or_never() {
        // One that came while the devices were prepared.
        return Ok(exit_code(OF_SIGNALS + signal.as_raw()));
    }
    let child = program.spawn().context("start the program")?;
    let pid = i32::try_from(child.id())
        .ok()
        .and_then(Pid::from_raw)
        .context("the program has no number")?;
    own.push(pid.as_raw_nonzero().get());
    let mut all = tokio::task::spawn_blocking(move || wait_for(pid, !is_tool));
    loop {
        tokio::select! {
            ended = &mut all => return ended.context("wait for the program"),
            signal = signals.received() => {
                // The terminal has sent it to all of this process group as well, where each decides what it means.
                let is_of_terminal = signal == Signal::INT && is_foreground();
                let children = children().unwrap_or_else(|error| {
                    tracing::warn!(%error, "what the program left behind cannot be listed, and gets no signal");
                    vec![pid]
                });
                for child in children {
                    if is_of_terminal && getpgid(Some(child)) == Ok(getpgrp()) {
                        continue;
                    }
                    // It may have ended.
                    let _ = kill_process(child, signal);
                }
            }
        }
    }
}

/// The signals that end a program, without those that were ignored before this one began, as by `nohup`: its program ignores them as well.
struct StopSignals(Vec<(Signal, tokio::signal::unix::Signal)>);

impl StopSignals {
    fn new() -> Result<Self> {
        let ignored =
            std::fs::read_to_string("/proc/self/status").context("read the ignored signals")?;
        let ignored = ignored
            .lines()
            .find_map(|line| line.strip_prefix("SigIgn:"));
        let ignored = ignored
            .and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok())
            .unwrap_or_default();
        let heeded = [Signal::TERM, Signal::INT, Signal::HUP].into_iter();
        let heeded = heeded.filter(|signal| ignored & (1 << (signal.as_raw() - 1)) == 0);
        heeded
            .map(|heeded| {
                let kind = SignalKind::from_raw(heeded.as_raw());
                Ok((heeded, signal(kind).context("listen for signals")?))
            })
            .collect::<Result<_>>()
            .map(Self)
    }

    /// The next one. One that is not received yet is not lost.
    async fn received(&mut self) -> Signal {
        poll_fn(|context| {
            let mut all = self.0.iter_mut();
            let ready = all.find_map(|(signal, stream)| match stream.poll_recv(context) {
                Poll::Ready(Some(())) => Some(*signal),
                Poll::Ready(None) | Poll::Pending => None,
            });
            ready.map_or(Poll::Pending, Poll::Ready)
        })
        .await
    }
}

/// Returns whether this process is in the foreground of its terminal, which sends its signals to all of its process group.
fn is_foreground() -> bool {
    // Behind the name: state, parent, process group, session, terminal, and the terminal's foreground process group; -1 without a terminal.
    // no error: then each process gets the signal from here, some of them twice
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let mut fields = stat
        .rsplit_once(')')
        .map_or("", |(_, fields)| fields)
        .split_ascii_whitespace()
        .skip(2);
    let (group, foreground) = (fields.next(), fields.nth(2));
    group.is_some() && group == foreground
}

/// The program, and what was left behind. They are children until they are waited for, so no other process has their numbers.
fn children() -> std::io::Result<Vec<Pid>> {
    let mut children = Vec::new();
    for thread in std::fs::read_dir("/proc/self/task")? {
        let list = match std::fs::read_to_string(thread?.path().join("children")) {
            // The thread has ended, and its children are another's.
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => continue,
            list => list?,
        };
        let numbers = list
            .split_ascii_whitespace()
            .filter_map(|number| number.parse().ok());
        children.extend(numbers.filter_map(Pid::from_raw));
    }
    Ok(children)
}

fn exit_code(of: i32) -> u8 {
    u8::try_from(of).unwrap_or(FAILED)
}

/// Waits for a child, or until there is no child any more, and returns the exit code of the one.
fn wait_for(program: Pid, waits_for_all: bool) -> u8 {
    let mut code = FAILED;
    loop {
        match wait(WaitOptions::empty()) {
            Ok(Some((pid, status))) if pid == program => {
                let ended = status.exit_status().or(status
                    .terminating_signal()
                    .map(|signal| OF_SIGNALS + signal));
                code = ended.map_or(FAILED, exit_code);
                if !waits_for_all {
                    return code;
                }
            }
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(_) => return code,
        }
    }
}

/// Becomes the program, after it was added to the processes of the claim.
pub(super) async fn hold(location: &Location, args: HoldArgs) -> Result<()> {
    let process = Process::this().context("identify this process")?;
    let began = Instant::now();
    loop {
        let added = match connect(location).await {
            Ok(client) => {
                let (key, value) = annotation_of(&process);
                let annotation = [(key, Some(value))];
                match client
                    .annotate(&args.namespace, &args.claim, &args.uid, None, &annotation)
                    .await
                {
                    // Another claim of its name, or none: it ended before the program began.
                    Err(error)
                        if matches!(error.kind, ErrorKind::NotFound | ErrorKind::Conflict) =>
                    {
                        return Err(
                            anyhow::Error::from(error).context("hold the claim for the program")
                        );
                    }
                    added => added.map_err(anyhow::Error::from),
                }
            }
            Err(error) => Err(error),
        };
        match added {
            Ok(claim)
                if claim
                    .pointer("/metadata/deletionTimestamp")
                    .is_some_and(Value::is_string) =>
            {
                bail!(
                    "claim {}/{} ended before the program began",
                    args.namespace,
                    args.claim
                );
            }
            Ok(_) => break,
            Err(_) if began.elapsed() < DAEMON_WAIT => sleep(DAEMON_RETRY).await,
            Err(error) => return Err(error.context("hold the claim for the program")),
        }
    }
    let Some((name, arguments)) = args.program.split_first() else {
        return Ok(());
    };
    let error = Command::new(name).args(arguments).exec();
    print_error(&format!(
        "error: start {}: {error}",
        Path::new(name).display()
    ));
    let code = match error.kind() {
        std::io::ErrorKind::NotFound => NOT_FOUND,
        _ => NOT_EXECUTABLE,
    };
    Err(CommandError::Ended { code }.into())
}

/// Returns the place of the command of a container tool behind which its devices belong. `None`: the program is no such tool, and none that runs one.
///
/// # Errors
///
/// The program is a tool, and its command makes no container.
fn tool_at(program: &[OsString]) -> Result<Option<usize>, CommandError> {
    let words: Vec<_> = program
        .iter()
        .map(|word| word.to_str().unwrap_or_default())
        .collect();
    if words.iter().any(|word| word.contains(PLACEHOLDER)) {
        return Ok(None);
    }
    for (number, word) in words.iter().enumerate() {
        let tool = word.rsplit('/').next().unwrap_or(word);
        if !TOOLS.contains(&tool) {
            continue;
        }
        let command = tool_command(&words[number + 1..]);
        if let Some(at) = command {
            return Ok(Some(number + 1 + at));
        }
        if number == 0 {
            let hint = match words.iter().any(|word| OTHERS.contains(word)) {
                true => "a container, and a service of compose, may have the device nodedock.dev/CLASS=any, without run-with".to_owned(),
                false => format!("write {PLACEHOLDER} where the devices belong, such as --device={PLACEHOLDER}"),
            };
            let message = format!("there is no `{tool} run` among the arguments");
            return Err(CommandError::usage(message, hint));
        }
    }
    Ok(None)
}

/// Returns the place of `run` among the words behind a tool: flags and their values are before it, and `container`.
fn tool_command(words: &[&str]) -> Option<usize> {
    let mut is_value = false;
    for (number, word) in words.iter().enumerate() {
        if *word == TOOL_COMMAND {
            return Some(number);
        }
        let is_flag = word.starts_with('-');
        if OTHERS.contains(word) || !(is_flag || is_value || *word == CONTAINER) {
            return None;
        }
        is_value = is_flag && !word.contains('=');
    }
    None
}

/// The program with the devices among its arguments.
fn with_devices(program: &[OsString], devices: &[String]) -> Result<Vec<OsString>, CommandError> {
    if let Some(at) = tool_at(program)? {
        let (before, after) = program.split_at(at + 1);
        let named = devices
            .iter()
            .flat_map(|device| [OsString::from("--device"), OsString::from(device)]);
        return Ok(before
            .iter()
            .cloned()
            .chain(named)
            .chain(after.iter().cloned())
            .collect());
    }
    let placed = program.iter().flat_map(|argument| match argument.to_str() {
        Some(PLACEHOLDER) => vec![OsString::from(devices.join(","))],
        Some(text) if text.contains(PLACEHOLDER) => devices
            .iter()
            .map(|device| OsString::from(text.replace(PLACEHOLDER, device)))
            .collect(),
        _ => vec![argument.clone()],
    });
    Ok(placed.collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn placed(program: &[&str]) -> Vec<String> {
        let program: Vec<OsString> = program.iter().map(OsString::from).collect();
        let devices = ["v/c=a".to_owned(), "v/c=b".to_owned()];
        let placed = with_devices(&program, &devices).unwrap();
        placed
            .into_iter()
            .map(|argument| argument.into_string().unwrap())
            .collect()
    }

    #[test]
    fn devices_are_placed_behind_the_command() {
        assert_eq!(
            placed(&[
                "/usr/bin/podman",
                "--runtime",
                "runc",
                "run",
                "--rm",
                "image",
                "run"
            ]),
            [
                "/usr/bin/podman",
                "--runtime",
                "runc",
                "run",
                "--device",
                "v/c=a",
                "--device",
                "v/c=b",
                "--rm",
                "image",
                "run"
            ]
        );
        assert_eq!(
            placed(&["x", "--device={cdi}", "y"]),
            ["x", "--device=v/c=a", "--device=v/c=b", "y"]
        );
        assert_eq!(
            placed(&["x", "--devices", "{cdi}"]),
            ["x", "--devices", "v/c=a,v/c=b"]
        );
        assert_eq!(
            placed(&["podman", "--x={cdi}", "run"]),
            ["podman", "--x=v/c=a", "--x=v/c=b", "run"]
        );
        assert_eq!(placed(&["sh", "-c", "run"]), ["sh", "-c", "run"]);
        for (program, expected) in [
            (
                "sudo -n podman run x",
                "sudo -n podman run --device v/c=a --device v/c=b x",
            ),
            (
                "env X=1 docker --context c container run x",
                "env X=1 docker --context c container run --device v/c=a --device v/c=b x",
            ),
            ("make podman test run", "make podman test run"),
        ] {
            let words: Vec<_> = program.split(' ').collect();
            assert_eq!(placed(&words).join(" "), expected);
        }
    }

    #[test]
    fn tool_without_its_command_is_refused() {
        for program in [
            "docker ps",
            "docker compose run web",
            "docker -D compose run web",
            "nerdctl ps run",
            "podman create x run",
        ] {
            let words: Vec<OsString> = program.split(' ').map(OsString::from).collect();
            let error = with_devices(&words, &[]).unwrap_err();
            assert!(error.to_string().contains(" run`"), "{error}");
        }
    }

    #[test]
    fn classes_may_have_counts() {
        assert_eq!(class_count("gpu"), Ok(("gpu".to_owned(), None)));
        assert_eq!(class_count("gpu=2"), Ok(("gpu".to_owned(), Some(2))));
        for wrong in ["gpu=", "gpu=0", "gpu=33", "gpu=x"] {
            assert!(class_count(wrong).is_err(), "{wrong}");
        }
    }
}
