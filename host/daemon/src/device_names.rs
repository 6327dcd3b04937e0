//! CDI files for containers on a machine without a cluster: names of classes that a user may write where devices are named, and of claims that
//! follow their containers.
//!
//! The devices of a class have one edit, a hook of the stage `createRuntime` whose arguments mark the container. `nodedock runtime` and the hook
//! `precreate` replace it by the devices of a claim; the hook itself fails, so no container starts without them. The device of a claim has the
//! hooks by which the claim belongs to the container.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use nodedock_base::backoff::Backoff;
use nodedock_base::conditions::Conditions;
use nodedock_base::paths::Paths;
use nodedock_core::cdi::{self, Device, FileAccess, Spec};
use nodedock_kube::local::{LocalClaims, LocalNames};
use nodedock_model::{Edits, Hook, ObjectRef, Problem, ProblemCode, limit};
use tokio::sync::Mutex;
use tokio::time::sleep;

/// Vendor of the devices.
const VENDOR: &str = "nodedock.dev";
/// CDI class of the devices of claims. A DeviceClass of this name has no file.
const CLAIM_CLASS: &str = "claim";
/// Beginning of the names of the devices of claims.
pub const CLAIM_KIND: &str = "nodedock.dev/claim=";
/// Stage of the hooks: the container has its processes, and has not started.
pub const STAGE: &str = "createRuntime";
/// The name of one device of a class.
const ONE: &str = "any";
/// Beginning of the name of a claim that was made before.
const CLAIM_PREFIX: &str = "claim-";
/// The arguments of a mark that tell it from other hooks.
const MARK: [&str; 2] = ["container", "device"];
/// Name of the program, the first argument of its hooks.
const NAME: &str = "nodedock";
/// Seconds that a container waits for a daemon that does not run, unless it is configured.
pub const DAEMON_WAIT_SECONDS: u64 = 30;
/// Command of the hook by which a claim belongs to a container.
const CREATED: &str = "created";

/// Subject of the condition that the files cannot be written.
const SUBJECT: &str = "nodedock.dev";
/// Pause after a write that failed, doubled up to the second.
const RETRY_MIN: Duration = Duration::from_millis(200);
const RETRY_MAX: Duration = Duration::from_secs(30);

/// Content of files, by their names.
type CdiFiles = BTreeMap<String, Vec<u8>>;

/// A device of a class.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ClassDevice {
    /// New devices, from 1 to 32.
    Count(usize),
    /// Those of a claim of this name.
    Claim(String),
}

/// Returns whether the arguments of a hook mark a container.
pub fn is_mark(args: &[String]) -> bool {
    is_of_program(args) && args.windows(MARK.len()).any(|args| args == MARK)
}

/// Returns whether the arguments of a hook let a claim belong to a container.
pub fn is_claim(args: &[String]) -> bool {
    is_of_program(args) && args.windows(2).any(|args| args == [MARK[0], CREATED])
}

/// Another program's hook may have such words.
fn is_of_program(args: &[String]) -> bool {
    args.first().is_some_and(|name| name == NAME)
}

/// Parses the name of a device of a class. Returns the DeviceClass too.
///
/// # Errors
///
/// It is no name that the daemon gives.
pub fn parse(qualified: &str) -> Result<(String, ClassDevice)> {
    let (vendor, rest) = qualified.split_once('/').unwrap_or_default();
    let (class, device) = rest.split_once('=').unwrap_or_default();
    if vendor != VENDOR || class.is_empty() {
        bail!("{qualified:?} is no device of a class: such as {VENDOR}/gpu={ONE}");
    }
    // The name of a DeviceClass has no underscore.
    let class = class.replace('_', ".");
    if device == ONE {
        return Ok((class, ClassDevice::Count(1)));
    }
    if let Some(claim) = device.strip_prefix(CLAIM_PREFIX) {
        return Ok((class, ClassDevice::Claim(claim.to_owned())));
    }
    match device.parse() {
        Ok(count) if (1..=limit::ALLOCATED_DEVICES_MAX).contains(&count) => {
            Ok((class, ClassDevice::Count(count)))
        }
        _ => bail!(
            "{device:?} is neither {ONE} nor a number of devices up to {} nor {CLAIM_PREFIX}NAME",
            limit::ALLOCATED_DEVICES_MAX
        ),
    }
}

/// Returns the class of CDI for a DeviceClass. `None`: CDI has no name for it, because it begins with a digit.
fn cdi_class(class: &str) -> Option<String> {
    let is_letter = class.starts_with(|first: char| first.is_ascii_alphabetic());
    (is_letter && class != CLAIM_CLASS).then(|| class.replace('.', "_"))
}

/// The program of the hooks, and the daemon that it asks.
#[derive(Debug, Clone)]
pub struct Program {
    pub program: PathBuf,
    pub root: PathBuf,
    /// Where it is not that of the root.
    pub socket: Option<PathBuf>,
}

impl Program {
    fn hook(&self, stage: &str, rest: impl IntoIterator<Item = String>) -> Hook {
        let text = |path: &Path| path.to_string_lossy().into_owned();
        let mut args = vec![NAME.to_owned(), "--root".to_owned(), text(&self.root)];
        if let Some(socket) = &self.socket {
            args.extend(["--socket".to_owned(), text(socket)]);
        }
        args.extend(rest);
        Hook {
            stage: stage.to_owned(),
            path: text(&self.program),
            args,
            env: Vec::new(),
            timeout_seconds: None,
        }
    }

    /// Returns the hooks by which a claim belongs to a container, or a container uses it as the pod with the UID `consumer`. `daemon_wait`: the
    /// seconds that the container waits for a daemon which does not run, where it is not [`DAEMON_WAIT_SECONDS`].
    pub fn claim_edits(
        &self,
        claim: &ObjectRef,
        consumer: Option<&str>,
        daemon_wait: Option<u64>,
    ) -> Edits {
        let consumer = consumer.map(|pod| format!("--consumer={pod}"));
        let of_claim = [
            claim.namespace.to_string(),
            claim.name.to_string(),
            claim.uid.to_string(),
        ];
        let hook = |stage: &str, command: &str, wait: Option<String>| {
            let mut args = vec![MARK[0].to_owned(), command.to_owned()];
            args.extend(consumer.iter().cloned().chain(wait));
            args.extend(of_claim.clone());
            self.hook(stage, args)
        };
        let wait = daemon_wait.map(|seconds| format!("--daemon-wait-seconds={seconds}"));
        Edits {
            hooks: vec![
                hook(STAGE, CREATED, wait),
                hook("poststop", "deleted", None),
            ],
            ..Edits::default()
        }
    }

    fn mark(&self, kind: &str, device: &str) -> Device {
        let [container, of_device] = MARK.map(str::to_owned);
        let args = [container, of_device, format!("{kind}={device}")];
        Device {
            name: device.to_owned(),
            container_edits: Edits {
                hooks: vec![self.hook(STAGE, args)],
                ..Edits::default()
            },
        }
    }
}

/// Returns the files for names, by their own. Pure.
fn render(daemon: &str, names: &LocalNames, program: &Program) -> CdiFiles {
    let mut specs = Vec::new();
    for (class, claims) in &names.classes {
        let Some(cdi_class) = cdi_class(class) else {
            continue;
        };
        let kind = format!("{VENDOR}/{cdi_class}");
        let counts = (1..=limit::ALLOCATED_DEVICES_MAX).map(|count| count.to_string());
        let claims = claims.iter().map(|claim| format!("{CLAIM_PREFIX}{claim}"));
        let devices = std::iter::once(ONE.to_owned()).chain(counts).chain(claims);
        let devices = devices.map(|device| program.mark(&kind, &device));
        specs.push((cdi_class, kind.clone(), devices.collect::<Vec<_>>()));
    }
    let claims = names.of_processes.iter().map(|claim| Device {
        name: device_of(claim.namespace.as_str(), claim.name.as_str()),
        container_edits: program.claim_edits(claim, None, None),
    });
    let claims: Vec<_> = claims.collect();
    if !claims.is_empty() {
        specs.push((
            CLAIM_CLASS.to_owned(),
            format!("{VENDOR}/{CLAIM_CLASS}"),
            claims,
        ));
    }
    let file = |(class, kind, devices): (String, String, Vec<Device>)| {
        let mut spec = Spec {
            kind,
            devices,
            ..Spec::default()
        };
        spec.cdi_version = spec.required_version().as_str().to_owned();
        let text = serde_json::to_vec(&spec).expect("a value with text keys is JSON");
        (file_name(daemon, &class), text)
    };
    specs.into_iter().map(file).collect()
}

/// Returns the name of the file of a class. `daemon` tells daemons with one directory apart.
fn file_name(daemon: &str, class: &str) -> String {
    format!("{VENDOR}-{daemon}-{class}.json")
}

/// Returns the name of the device of a claim. Neither part has an underscore.
fn device_of(namespace: &str, name: &str) -> String {
    format!("{namespace}_{name}")
}

/// Returns the files of an earlier run, without content.
fn earlier(directory: &Path, daemon: &str) -> Result<CdiFiles> {
    let prefix = format!("{VENDOR}-{daemon}-");
    let failed = || format!("list {}", directory.display());
    let mut files = BTreeMap::new();
    for entry in std::fs::read_dir(directory).with_context(failed)? {
        let name = entry.with_context(failed)?.file_name().into_string();
        files.extend(
            name.ok()
                .filter(|name| name.starts_with(&prefix))
                .map(|name| (name, Vec::new())),
        );
    }
    Ok(files)
}

/// The files as they were written last. Clones write the same ones.
#[derive(Clone)]
pub struct DeviceNames {
    /// Tells the files from those of another daemon.
    daemon: String,
    directory: PathBuf,
    access: FileAccess,
    program: Program,
    /// Directories that runtimes read, by priority.
    directories: Vec<PathBuf>,
    /// `None`: those of an earlier run are not looked for yet.
    written: Arc<Mutex<Option<CdiFiles>>>,
}

impl DeviceNames {
    pub(crate) fn new(paths: &Paths, access: FileAccess) -> Result<Self> {
        let daemon = std::env::current_exe().context("find this program")?;
        let default = Paths::below(&paths.root).socket;
        let mut directories = paths.cdi_spec_dirs.clone();
        if !directories.contains(&paths.cdi) {
            directories.push(paths.cdi.clone());
        }
        Ok(Self {
            daemon: cdi::tag(&paths.identity()),
            directory: paths.cdi.clone(),
            access,
            program: Program {
                // The command line is installed beside the node program.
                program: daemon.with_file_name("nodedock"),
                root: paths.root.clone(),
                socket: (paths.socket != default).then(|| paths.socket.clone()),
            },
            directories,
            written: Arc::default(),
        })
    }

    /// Returns the directories that runtimes read, by priority, as text.
    pub fn directories(&self) -> Vec<String> {
        let shown = self
            .directories
            .iter()
            .map(|directory| directory.display().to_string());
        shown.collect()
    }

    /// Writes the files of these names, and removes those of others.
    ///
    /// # Errors
    ///
    /// The directory cannot be written.
    pub async fn write(&self, names: &LocalNames) -> Result<()> {
        let wanted = render(&self.daemon, names, &self.program);
        let mut written = self.written.clone().lock_owned().await;
        let this = self.clone();
        let work = move || {
            let written = match &mut *written {
                Some(written) => written,
                none => none.insert(earlier(&this.directory, &this.daemon)?),
            };
            let gone: BTreeSet<_> = written
                .keys()
                .filter(|name| !wanted.contains_key(*name))
                .cloned()
                .collect();
            for name in gone {
                match std::fs::remove_file(this.directory.join(&name)) {
                    Err(error) if error.kind() != ErrorKind::NotFound => {
                        return Err(error).with_context(|| format!("remove {name}"));
                    }
                    _ => {}
                }
                written.remove(&name);
            }
            for (name, text) in wanted {
                if written.get(&name) != Some(&text) {
                    this.replace(&name, &text)
                        .with_context(|| format!("write {name}"))?;
                    written.insert(name, text);
                }
            }
            Ok(())
        };
        tokio::task::spawn_blocking(work)
            .await
            .context("the daemon ends")?
    }

    fn replace(&self, name: &str, text: &[u8]) -> std::io::Result<()> {
        let mut file = tempfile::Builder::new()
            .prefix(".nodedock-")
            .suffix(".tmp")
            .tempfile_in(&self.directory)?;
        file.write_all(text)?;
        self.access.apply(file.as_file())?;
        file.persist(self.directory.join(name))?;
        Ok(())
    }

    /// Returns the names of the devices of claims that end with processes, by namespace and name, once their file has these.
    ///
    /// # Errors
    ///
    /// The directory cannot be written.
    pub async fn claim_devices(
        &self,
        local: &LocalClaims,
        claims: impl Iterator<Item = (String, String)>,
    ) -> Result<Vec<String>> {
        let of_processes = claims.filter(|claim| local.ends_with_processes(claim));
        let devices: Vec<_> = of_processes
            .map(|(namespace, name)| format!("{CLAIM_KIND}{}", device_of(&namespace, &name)))
            .collect();
        if !devices.is_empty() {
            self.write(&local.names()).await?;
        }
        Ok(devices)
    }
}

/// Keeps the files as the claims and classes are, without end; without a local API there are none, and those of an earlier run are removed.
pub(crate) async fn keep(names: DeviceNames, claims: Option<LocalClaims>, conditions: Conditions) {
    let Some(mut listener) = claims.map(|claims| claims.names_listener()) else {
        if let Err(error) = names.write(&LocalNames::default()).await {
            tracing::warn!(
                error = format!("{error:#}"),
                "names of classes for containers stay"
            );
        }
        return;
    };
    while let Some(mut wanted) = listener.next().await {
        let mut backoff = Backoff::new(RETRY_MIN, RETRY_MAX);
        while let Err(error) = names.write(&wanted).await {
            let message = format!("names of classes and claims for containers: {error:#}");
            let problem = Problem::internal(ProblemCode::CdiNotWritten, message);
            conditions.set(SUBJECT, problem);
            tokio::select! {
                () = sleep(backoff.delay()) => {}
                Some(newer) = listener.next() => wanted = newer,
            }
        }
        conditions.clear(ProblemCode::CdiNotWritten, SUBJECT);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn program() -> Program {
        Program {
            program: "/usr/bin/nodedock".into(),
            root: "/r".into(),
            socket: Some("/s".into()),
        }
    }

    fn names(classes: &[(&str, &[&str])], of_processes: &[(&str, &str, &str)]) -> LocalNames {
        let class = |(class, claims): &(&str, &[&str])| {
            let claims = claims.iter().map(|claim| (*claim).to_owned());
            ((*class).to_owned(), claims.collect())
        };
        LocalNames {
            classes: classes.iter().map(class).collect(),
            of_processes: of_processes
                .iter()
                .map(|(namespace, name, uid)| ObjectRef::new(namespace, name, uid).unwrap())
                .collect(),
        }
    }

    #[test]
    fn class_files_have_every_name() {
        let names = names(
            &[
                ("gpu", &["mine"]),
                ("nic.example.com", &[]),
                ("3d", &[]),
                ("claim", &[]),
            ],
            &[],
        );
        let files = render("d", &names, &program());
        let known: Vec<_> = files.keys().map(String::as_str).collect();
        assert_eq!(
            known,
            [
                "nodedock.dev-d-gpu.json",
                "nodedock.dev-d-nic_example_com.json"
            ]
        );
        let spec: Spec = serde_json::from_slice(&files["nodedock.dev-d-gpu.json"]).unwrap();
        cdi::validate(&spec).unwrap();
        assert_eq!(
            (spec.kind.as_str(), spec.devices.len()),
            ("nodedock.dev/gpu", 34)
        );
        for device in &spec.devices {
            let [hook] = &device.container_edits.hooks[..] else {
                panic!("{device:?}")
            };
            assert!(is_mark(&hook.args) && !is_claim(&hook.args));
            let name = format!("nodedock.dev/gpu={}", device.name);
            let rest = ["container", "device", &name];
            assert_eq!(
                hook.args[..5],
                ["nodedock", "--root", "/r", "--socket", "/s"]
            );
            assert_eq!(
                (hook.args[5..].to_vec(), hook.stage.as_str()),
                (rest.map(str::to_owned).to_vec(), STAGE)
            );
            let (class, parsed) = parse(&name).unwrap();
            assert_eq!(class, "gpu");
            assert_eq!(
                parsed,
                match device.name.as_str() {
                    "any" => ClassDevice::Count(1),
                    "claim-mine" => ClassDevice::Claim("mine".to_owned()),
                    count => ClassDevice::Count(count.parse().unwrap()),
                }
            );
        }
        assert_eq!(
            parse("nodedock.dev/nic_example_com=2").unwrap().0,
            "nic.example.com"
        );
    }

    #[test]
    fn malformed_names_are_refused() {
        for name in [
            "",
            "gpu",
            "nodedock.dev/gpu",
            "other/gpu=any",
            "nodedock.dev/=any",
            "nodedock.dev/gpu=0",
            "nodedock.dev/gpu=33",
            "nodedock.dev/gpu=all",
            "nodedock.dev/gpu=",
        ] {
            let error = parse(name).unwrap_err().to_string();
            assert!(error.contains("any"), "{name}: {error}");
        }
    }

    #[test]
    fn claims_of_processes_follow_containers() {
        let names = names(&[], &[("default", "run-with-1", "u-1")]);
        let files = render("d", &names, &program());
        let spec: Spec = serde_json::from_slice(&files["nodedock.dev-d-claim.json"]).unwrap();
        cdi::validate(&spec).unwrap();
        let [device] = &spec.devices[..] else {
            panic!("{spec:?}")
        };
        assert_eq!(
            format!("{}={}", spec.kind, device.name),
            format!("{CLAIM_KIND}default_run-with-1")
        );
        let hooks: Vec<_> = device
            .container_edits
            .hooks
            .iter()
            .map(|hook| (hook.stage.as_str(), &hook.args[5..]))
            .collect();
        let of = |command: &str| {
            ["container", command, "default", "run-with-1", "u-1"].map(str::to_owned)
        };
        assert_eq!(
            hooks,
            [
                ("createRuntime", &of("created")[..]),
                ("poststop", &of("deleted")[..])
            ]
        );
        assert!(is_claim(&device.container_edits.hooks[0].args));
        let claim = ObjectRef::new("default", "c", "u").unwrap();
        let edits = program().claim_edits(&claim, Some("p"), Some(7));
        let args = [0, 1].map(|hook| edits.hooks[hook].args[6..].join(" "));
        assert_eq!(
            args,
            [
                "created --consumer=p --daemon-wait-seconds=7 default c u",
                "deleted --consumer=p default c u"
            ]
        );
    }

    #[tokio::test]
    async fn files_follow_the_names() {
        let directory = tempfile::tempdir().unwrap();
        let names_of = |daemon: &str| DeviceNames {
            daemon: daemon.to_owned(),
            directory: directory.path().to_owned(),
            access: FileAccess::default(),
            program: program(),
            directories: Vec::new(),
            written: Arc::default(),
        };
        let files = || {
            let entries = std::fs::read_dir(directory.path()).unwrap();
            let mut names: Vec<_> = entries
                .map(|entry| entry.unwrap().file_name().into_string().unwrap())
                .collect();
            names.sort();
            names
        };
        std::fs::write(directory.path().join("other.json"), "{}").unwrap();
        names_of("e")
            .write(&names(&[("gpu", &[])], &[]))
            .await
            .unwrap();
        names_of("d")
            .write(&names(&[("gpu", &[]), ("nic", &[])], &[]))
            .await
            .unwrap();
        let later = names_of("d");
        later
            .write(&names(&[("nic", &["mine"])], &[]))
            .await
            .unwrap();
        assert_eq!(
            files(),
            [
                "nodedock.dev-d-nic.json",
                "nodedock.dev-e-gpu.json",
                "other.json"
            ]
        );
        let text =
            std::fs::read_to_string(directory.path().join("nodedock.dev-d-nic.json")).unwrap();
        assert!(text.contains("claim-mine"));
        std::fs::remove_file(directory.path().join("nodedock.dev-d-nic.json")).unwrap();
        later.write(&LocalNames::default()).await.unwrap();
        assert_eq!(files(), ["nodedock.dev-e-gpu.json", "other.json"]);
    }
}
