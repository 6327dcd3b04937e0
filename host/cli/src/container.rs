//! Devices of containers by the names of their classes: `--device nodedock.dev/gpu=any`.
//!
//! The daemon keeps CDI files whose devices have one edit, a hook that marks the container. An OCI runtime around the configured one (`nodedock
//! runtime`), or podman's hook `precreate`, finds the marks in the configuration of a container, makes a claim for them, waits for its devices,
//! prepares it, and puts the edits of the devices in the place of the marks. A mark that nothing found is a hook that fails, so no container
//! starts without its devices.
//!
//! The claim belongs to the program that creates the container, and from the hook `createRuntime` on to the first process of the container. The
//! daemon ends it with that process, also when any of the other programs is killed.

mod cdi;
mod oci;
#[cfg(test)]
mod page_tests;
mod runtime;

use std::ffi::OsString;
use std::io::Read;
use std::os::unix::net::UnixDatagram;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::{Args, Parser, Subcommand};
use nodedock_base::process::Process;
use nodedock_kube::client::{ApiError, ErrorKind};
use nodedock_kube::local::{CONSUMER_ANNOTATION, CREATOR_ANNOTATION, annotation_of};
use nodedock_kube::local_client::LocalClient;
use nodedock_model::{Edits, ObjectRef};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::time::{Instant, sleep};
use uuid::Uuid;

use super::local_api::{connect, namespace, text};
use super::output::{print_error, print_text};
use super::owned_claim::{
    DAEMON_RETRY, DeviceWait, NewClaim, OwnedClaim, PreparedDevices, has_processes, new_name,
};
use super::{CommandError, Location};
use nodedockd::device_names::{self, ClassDevice, DAEMON_WAIT_SECONDS};

pub(super) use runtime::{arguments as runtime_arguments, main as runtime_main};

/// The command of the hooks.
const COMMAND: &str = "container";

/// Annotation of a claim with the ID of its container.
const CONTAINER_ANNOTATION: &str = "container.nodedock.dev/id";

/// Time that the end of a container waits until its devices are free. The daemon frees them in any case.
const END_WAIT: Duration = Duration::from_secs(5);

/// Socket of the system's log.
const LOG: &str = "/dev/log";

/// Bytes of a configuration or of a state of a container.
const INPUT_BYTES_MAX: u64 = 64 << 20;

#[derive(Subcommand)]
pub(super) enum ContainerCommand {
    /// Give a container its devices: a hook of podman's stage precreate, with the container's configuration on standard input and output
    Precreate(SettingsArgs),
    /// Let a claim belong to a container: the hook createRuntime of a container with devices
    #[command(hide = true)]
    Created(CreatedArgs),
    /// Wait until the claim of a container has ended: the hook poststop of a container with devices
    #[command(hide = true)]
    Deleted(ClaimArgs),
    /// Fail: the mark of a container whose devices nothing has added
    #[command(hide = true)]
    Device(MarkArgs),
}

/// A claim in the arguments of a hook.
#[derive(Args)]
pub(super) struct ClaimArgs {
    #[arg(value_name = "NAMESPACE")]
    namespace: String,
    #[arg(value_name = "NAME")]
    name: String,
    #[arg(value_name = "UID")]
    uid: String,
    /// The UID of the pod that the container is to the claim; without it the claim ends with the container
    #[arg(long)]
    consumer: Option<String>,
}

#[derive(Args)]
pub(super) struct CreatedArgs {
    #[command(flatten)]
    claim: ClaimArgs,
    /// Seconds to wait for a daemon that is being started
    #[arg(long, value_name = "SECONDS", default_value_t = DAEMON_WAIT_SECONDS)]
    daemon_wait_seconds: u64,
}

/// A mark of a container.
#[derive(Args)]
pub(super) struct MarkArgs {
    /// The CDI name of the device
    device: String,
}

/// Settings of the runtime and of the hook.
#[derive(Debug, Clone, PartialEq, Args, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub(super) struct SettingsArgs {
    /// Seconds to wait for devices that others have
    #[arg(long, value_name = "SECONDS", default_value_t = 0)]
    wait_seconds: u64,
    /// Seconds to wait for a daemon that is being started
    #[arg(long, value_name = "SECONDS", default_value_t = DAEMON_WAIT_SECONDS)]
    daemon_wait_seconds: u64,
}

impl Default for SettingsArgs {
    fn default() -> Self {
        Self {
            wait_seconds: 0,
            daemon_wait_seconds: DAEMON_WAIT_SECONDS,
        }
    }
}

pub(super) async fn run(location: &Location, command: ContainerCommand) -> Result<()> {
    match command {
        ContainerCommand::Precreate(settings) => {
            let done = precreate(&settings).await;
            if let Err(error) = &done {
                log(ERROR, &format!("{error:#}"));
            }
            done
        }
        ContainerCommand::Created(claim) => created(location, &claim).await,
        ContainerCommand::Deleted(claim) => {
            // The end of a container never fails because of its claim, which the daemon ends.
            if let Err(error) = deleted(location, &claim).await {
                let name = format!("{}/{}", claim.namespace, claim.name);
                print_error(&format!("warning: the daemon ends claim {name}: {error:#}"));
            }
            Ok(())
        }
        ContainerCommand::Device(mark) => bail!(
            "the container has no device for {}: its runtime is not `nodedock runtime`, and no hook `nodedock container precreate` gave it one",
            mark.device
        ),
    }
}

/// Reads a configuration, gives its container the devices, and writes it.
async fn precreate(settings: &SettingsArgs) -> Result<()> {
    let mut config = read_input().context("read the configuration of the container")?;
    // The hook ends before the container begins; podman creates it.
    let creator = rustix::process::getppid().context("podman has ended")?;
    let creator = Process::with_number(creator.as_raw_nonzero().get())?;
    give_devices(&mut config, None, &creator, settings).await?;
    print_text(&config.to_string()).context("write the configuration of the container")
}

/// Severities of the system's log, of messages of users (syslog(3)).
const ERROR: u8 = 8 + 3;
const INFORMATION: u8 = 8 + 6;

/// Writes a line to the system's log: container tools do not show what their runtimes and hooks print before they end.
fn log(severity: u8, line: &str) {
    let line = format!("<{severity}>nodedock: {line}");
    let sent = UnixDatagram::unbound().and_then(|socket| socket.send_to(line.as_bytes(), LOG));
    if let Err(error) = sent {
        print_error(&format!("warning: write to {LOG}: {error}"));
    }
}

fn read_input() -> Result<Value> {
    let mut text = String::new();
    std::io::stdin()
        .take(INPUT_BYTES_MAX)
        .read_to_string(&mut text)?;
    Ok(serde_json::from_str(&text)?)
}

/// Claims for the marks of a container, made and prepared.
struct Marked {
    location: Location,
    devices: Vec<(String, ClassDevice)>,
}

/// Puts devices into the configuration of a container in the place of its marks. Without marks it stays unchanged. Returns whether there were any.
///
/// # Errors
///
/// No devices are free in time, or the daemon does not answer in time; nothing is left of the claim then.
async fn give_devices(
    config: &mut Value,
    container: Option<&str>,
    creator: &Process,
    settings: &SettingsArgs,
) -> Result<bool> {
    let Some(marked) = take_marks(config)? else {
        return Ok(false);
    };
    let location = &marked.location;
    let daemon = Duration::from_secs(settings.daemon_wait_seconds);
    let client = in_time(daemon, async || connect(location).await).await?;
    let wait = DeviceWait {
        most: Some(Duration::from_secs(settings.wait_seconds)),
        report: |line| log(INFORMATION, line),
        daemon,
        waits_for_missing: false,
    };
    let uses = uses(&client, &marked, container, creator, wait.daemon).await?;
    for of in &uses {
        let given = give(config, &marked, of, wait).await;
        if let Err(error) = given {
            for of in &uses {
                of.end(location, &client).await;
            }
            return Err(error);
        }
    }
    Ok(true)
}

/// A claim that the container has devices of.
struct Use {
    claim: OwnedClaim,
    /// The container as a pod, if the claim outlives it.
    consumer: Option<ObjectRef>,
}

impl Use {
    /// Ends what was made for the container.
    async fn end(&self, location: &Location, client: &LocalClient) {
        if self.consumer.is_none() {
            self.claim.end(location, client).await;
        }
        // A use of another claim ends with the creator of the container.
    }
}

/// Makes one claim for all devices by class, and finds the claims that were made before.
async fn uses(
    client: &LocalClient,
    marked: &Marked,
    container: Option<&str>,
    creator: &Process,
    daemon_wait: Duration,
) -> Result<Vec<Use>> {
    let namespace = namespace(&marked.location);
    let mut uses = Vec::new();
    let mut requests = Vec::new();
    let (_, process) = annotation_of(creator);
    for (number, (class, device)) in marked.devices.iter().enumerate() {
        match device {
            ClassDevice::Count(count) => requests.push(json!({
                "name": format!("device-{number}"),
                "exactly": { "deviceClassName": class, "allocationMode": "ExactCount", "count": count },
            })),
            ClassDevice::Claim(name) => {
                let found = client.claim(&namespace, name).await?;
                let found = found.with_context(|| format!("there is no claim {namespace}/{name}"))?;
                let claim = OwnedClaim::of(&found)?;
                let uid = Uuid::new_v4().to_string();
                let pod = ObjectRef::new(&namespace, &format!("container-{uid}"), &uid)?;
                let consumer = [(format!("{CONSUMER_ANNOTATION}{uid}"), Some(process.clone()))];
                let id = &claim.id;
                client
                    .annotate(id.namespace.as_str(), id.name.as_str(), id.uid.as_str(), None, &consumer)
                    .await?;
                uses.push(Use { claim, consumer: Some(pod) });
            }
        }
    }
    if !requests.is_empty() {
        let mut annotations = vec![(CREATOR_ANNOTATION.to_owned(), process)];
        annotations.extend(container.map(|id| (CONTAINER_ANNOTATION.to_owned(), id.to_owned())));
        let claim = NewClaim {
            name: new_name("container"),
            annotations,
            labels: Value::Null,
            spec: json!({ "devices": { "requests": requests } }),
        };
        uses.push(Use {
            claim: OwnedClaim::make(client, &namespace, claim, daemon_wait).await?,
            consumer: None,
        });
    }
    Ok(uses)
}

/// Prepares a claim, and puts its edits and its hooks into the configuration.
async fn give(config: &mut Value, marked: &Marked, of: &Use, wait: DeviceWait) -> Result<()> {
    let location = &marked.location;
    let prepared = of
        .claim
        .prepare(location, of.consumer.as_ref(), wait)
        .await?;
    for edits in edits(&prepared)? {
        oci::apply(config, &edits)?;
    }
    let id = &of.claim.id;
    let consumer = of.consumer.as_ref().map(|pod| pod.uid.as_str());
    let program = std::env::current_exe().context("find this program")?;
    let hooks = device_names::Program {
        program,
        root: location.root.clone(),
        socket: location.socket.clone(),
    };
    let daemon_wait = Some(wait.daemon.as_secs());
    oci::apply(config, &hooks.claim_edits(id, consumer, daemon_wait))
}

/// Returns the container edits of the devices, without the hooks of their claim.
pub(super) fn edits(prepared: &PreparedDevices) -> Result<Vec<Edits>> {
    let names = prepared.names.iter();
    let names = names.filter(|name| !name.starts_with(device_names::CLAIM_KIND));
    cdi::edits(&prepared.directories, &names.cloned().collect::<Vec<_>>())
}

/// Takes the marks out of a configuration. `None`: there are none.
fn take_marks(config: &mut Value) -> Result<Option<Marked>> {
    let marks = oci::take_hooks(config, device_names::STAGE, device_names::is_mark)?;
    let mut marked: Option<Marked> = None;
    for args in marks {
        let (location, mark) =
            parse_mark(&args).with_context(|| format!("the mark {args:?} of the container"))?;
        let marked = marked.get_or_insert_with(|| Marked {
            location,
            devices: Vec::new(),
        });
        marked.devices.push(device_names::parse(&mark.device)?);
    }
    Ok(marked)
}

/// Takes the hooks of a container whose devices this program added.
fn device_hooks(config: &mut Value) -> Result<Vec<Vec<String>>> {
    oci::take_hooks(config, device_names::STAGE, device_names::is_claim)
}

/// The part of the command line that hooks use: it is parsed in a fraction of the time of all of it, and each container waits for some of them.
#[derive(Parser)]
#[command(name = "nodedock")]
struct HookLine {
    #[command(flatten)]
    location: Location,
    #[command(subcommand)]
    command: HookCommand,
}

#[derive(Subcommand)]
enum HookCommand {
    #[command(subcommand)]
    Container(ContainerCommand),
}

/// Returns the command of a hook. `None`: the whole command line has to say what it is.
pub(super) fn hook(args: Vec<OsString>) -> Option<(Location, ContainerCommand)> {
    let is_hook = args.iter().any(|arg| arg == COMMAND);
    // no error: the whole command line names what is wrong
    let line = is_hook.then(|| HookLine::try_parse_from(args).ok())??;
    let HookCommand::Container(command) = line.command;
    Some((line.location, command))
}

fn parse_mark(args: &[String]) -> Result<(Location, MarkArgs)> {
    let HookLine { location, command } = HookLine::try_parse_from(args)?;
    match command {
        HookCommand::Container(ContainerCommand::Device(mark)) => Ok((location, mark)),
        HookCommand::Container(_) => bail!("it is another command"),
    }
}

/// Repeats work while the daemon does not answer, for at most this time.
async fn in_time<T>(most: Duration, work: impl AsyncFn() -> Result<T>) -> Result<T> {
    let began = Instant::now();
    loop {
        match work().await {
            Err(error) if is_absent(&error) && began.elapsed() < most => sleep(DAEMON_RETRY).await,
            done => return done,
        }
    }
}

/// Returns whether an error says that the local API did not answer.
fn is_absent(error: &anyhow::Error) -> bool {
    let of_api = error.downcast_ref::<ApiError>();
    matches!(error.downcast_ref(), Some(CommandError::NoLocalApi { .. }))
        || of_api.is_some_and(ApiError::is_unreachable)
}

/// The state of a container that a runtime gives to its hooks (OCI runtime specification).
#[derive(Deserialize)]
struct State {
    id: String,
    #[serde(default)]
    pid: i32,
}

/// Lets the claim belong to the first process of the container, and no more to the program that creates it.
async fn created(location: &Location, args: &CreatedArgs) -> Result<()> {
    let state: State =
        serde_json::from_value(read_input().context("read the state of the container")?)?;
    let process =
        Process::of_container(state.pid).context("identify the first process of the container")?;
    let (key, value) = annotation_of(&process);
    let claim = &args.claim;
    let annotations = match &claim.consumer {
        Some(pod) => vec![(format!("{CONSUMER_ANNOTATION}{pod}"), Some(value))],
        None => vec![
            (key, Some(value)),
            (CREATOR_ANNOTATION.to_owned(), None),
            (CONTAINER_ANNOTATION.to_owned(), Some(state.id)),
        ],
    };
    let most = Duration::from_secs(args.daemon_wait_seconds);
    in_time(most, async || follow(location, claim, &annotations).await).await
}

/// Writes the annotations by which the claim belongs to the container. What was written before may be written again.
async fn follow(
    location: &Location,
    args: &ClaimArgs,
    annotations: &[(String, Option<String>)],
) -> Result<()> {
    let client = connect(location).await?;
    let ended = || {
        format!(
            "claim {}/{} has no devices for the container any more",
            args.namespace, args.name
        )
    };
    let version = match &args.consumer {
        Some(pod) => Some(
            version_with_consumer(&client, args, pod)
                .await?
                .with_context(ended)?,
        ),
        None => None,
    };
    let claim = client
        .annotate(
            &args.namespace,
            &args.name,
            &args.uid,
            version.as_deref(),
            annotations,
        )
        .await
        .with_context(ended)?;
    if !text(&claim, "/metadata/deletionTimestamp").is_empty() {
        bail!(
            "claim {}/{} ended before the container began",
            args.namespace,
            args.name
        );
    }
    Ok(())
}

/// Returns the version of a claim that the container still uses as a pod: a use that ended with its creator is not prepared any more.
async fn version_with_consumer(
    client: &LocalClient,
    args: &ClaimArgs,
    pod: &str,
) -> Result<Option<String>> {
    let claim = client.claim(&args.namespace, &args.name).await?;
    let key = format!("{CONSUMER_ANNOTATION}{pod}");
    let used = claim.filter(|claim| !claim["metadata"]["annotations"][&key].is_null());
    Ok(used.map(|claim| text(&claim, "/metadata/resourceVersion").to_owned()))
}

/// Waits until the claim is gone if it belongs to this container alone, so that the next one can have the devices.
async fn deleted(location: &Location, args: &ClaimArgs) -> Result<()> {
    if args.consumer.is_some() {
        return Ok(());
    }
    let client = connect(location).await?;
    let claim = match client.claim(&args.namespace, &args.name).await {
        Err(error) if error.kind == ErrorKind::NotFound => None,
        found => found?,
    };
    let Some(found) = claim.filter(|claim| text(claim, "/metadata/uid") == args.uid) else {
        return Ok(());
    };
    if !has_processes(&found, &[])? {
        client
            .until_gone(&args.namespace, &args.name, &args.uid, END_WAIT)
            .await;
    }
    Ok(())
}
/// Returns paths as text, separated by commas.
fn shown<'a, P: AsRef<Path> + 'a>(paths: impl IntoIterator<Item = &'a P>) -> String {
    let paths = paths.into_iter().map(|path| path.as_ref().display());
    paths
        .map(|path| path.to_string())
        .collect::<Vec<_>>()
        .join(", ")
}
