//! Configuration: the daemon's own (flags over file over defaults), and what operators write for drivers.
//!
//! Only values: paths are derived here, and nothing is created or opened but the file that is read, and the keys that it names.

pub(crate) mod adapters;
mod binding;
mod cdi_driver;
mod cdi_files;
mod driver_images;
mod kubernetes;
mod local_api;
mod node_name;
mod overhead;
mod recording;
mod values;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Deserialize;

use nodedock_base::paths::Paths;
use nodedock_core::cdi::FileAccess;
use nodedock_core::cdi_driver::CdiDriverSettings;
use nodedock_core::hardware::Hardware;
use nodedock_model::{Adapter, ObjectName, Uid, limit};
use nodedock_wasm::driver_image::DriverImage;
use nodedock_wasm::trust;

pub use cdi_driver::CdiDriverSection;
pub use cdi_files::CdiFilesSection;
pub use driver_images::DriverImageEntry;
pub use kubernetes::{KubernetesConfig, KubernetesFlags, KubernetesSection, SettingsError};
pub use local_api::{LocalApiConfig, LocalApiFlags, LocalApiSection, UsersConfig};
pub use node_name::NodeName;
pub use recording::{RecordedName, RecordingSection};

/// The daemon's config file. Every key may be absent.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct ConfigFile {
    /// Name of this node; the one that it had, and at first the machine's host name, unless set.
    pub node_name: Option<String>,
    /// Directory into which CDI specs are written.
    pub cdi_dir: Option<PathBuf>,
    /// Directories in which container runtimes look for CDI specs, by priority, as in their own configs.
    #[serde(deserialize_with = "values::directories")]
    pub cdi_spec_dirs: Option<Vec<PathBuf>>,
    /// Access of users to the CDI files.
    pub cdi_files: CdiFilesSection,
    /// True if containers get files with the attributes of their devices (KEP-5304); true unless set.
    pub device_metadata: Option<bool>,
    pub claims: ClaimsSection,
    pub admin: AdminSection,
    pub kubernetes: KubernetesSection,
    pub local_api: LocalApiSection,
    pub recording: RecordingSection,
    /// Directories with one driver each, beside the drivers directory.
    #[serde(deserialize_with = "driver_images::entries")]
    pub driver_images: Vec<DriverImageEntry>,
    /// Device plugins that are DRA drivers, beside those of files.
    #[serde(deserialize_with = "adapters::entries")]
    pub device_plugin_adapters: Vec<Adapter>,
    /// The host's own driver of devices in CDI specs.
    pub cdi_driver: CdiDriverSection,
    /// The section as written; `policy` is checked.
    trust: trust::Section,
    /// The checked `trust` section with its keys.
    #[serde(skip)]
    pub policy: trust::Policy,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct AdminSection {
    /// IP address and port on which metrics and probes are answered besides the admin socket; none unless set. There is no
    /// authentication.
    #[serde(deserialize_with = "values::address")]
    pub listen: Option<SocketAddr>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct ClaimsSection {
    /// Milliseconds that a prepare waits for another claim to be released from a device.
    #[serde(deserialize_with = "values::within::<_, _, 0, 60_000>")]
    pub exclusive_wait_ms: Option<u64>,
    /// Milliseconds that a driver has for a prepare or an unprepare.
    #[serde(deserialize_with = "values::within::<_, _, 100, 300_000>")]
    pub call_deadline_ms: Option<u64>,
}

#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    #[error("read the config {}", path.display())]
    Read {
        path: PathBuf,
        source: std::io::Error,
    },
    #[error("the config {} is not valid", path.display())]
    Parse {
        path: PathBuf,
        source: Box<serde_saphyr::Error>,
    },
    #[error("the config {}", path.display())]
    Trust {
        path: PathBuf,
        source: Box<trust::SectionError>,
    },
}

impl ConfigFile {
    /// Reads and checks a file. Unknown keys, wrong types and values out of range are errors with line and column.
    pub fn read(path: &Path) -> Result<Self, ConfigError> {
        let text = std::fs::read_to_string(path).map_err(|source| ConfigError::Read {
            path: path.to_owned(),
            source,
        })?;
        Self::parse(&text, path)
    }

    pub(crate) fn parse(text: &str, path: &Path) -> Result<Self, ConfigError> {
        let mut config: Self =
            serde_saphyr::from_str(text).map_err(|error| ConfigError::Parse {
                path: path.to_owned(),
                source: Box::new(error),
            })?;
        config.policy = config
            .trust
            .check(path.parent().unwrap_or(path))
            .map_err(|source| ConfigError::Trust {
                path: path.to_owned(),
                source: Box::new(source),
            })?;
        Ok(config)
    }

    /// Returns the driver images, with their grants and configs beside the config file at `path`.
    pub(crate) fn images(&self, path: &Path) -> Vec<DriverImage> {
        let entries = self.driver_images.iter();
        entries.map(|entry| entry.image(path)).collect()
    }

    /// Returns the keys whose values differ from another file's and are read only when the daemon starts.
    pub fn needs_restart(&self, started: &Self) -> Vec<&'static str> {
        let differs = [
            ("nodeName", self.node_name != started.node_name),
            ("cdiDir", self.cdi_dir != started.cdi_dir),
            ("cdiSpecDirs", self.cdi_spec_dirs != started.cdi_spec_dirs),
            ("cdiFiles", self.cdi_files != started.cdi_files),
            (
                "deviceMetadata",
                self.device_metadata != started.device_metadata,
            ),
            ("claims", self.claims != started.claims),
            ("admin", self.admin != started.admin),
            (
                "kubernetes",
                self.kubernetes.read_at_start() != started.kubernetes.read_at_start(),
            ),
            ("localApi", self.local_api != started.local_api),
            (
                "recording.maxBytes",
                self.recording.max_bytes != started.recording.max_bytes,
            ),
            ("cdiDriver", self.cdi_driver != started.cdi_driver),
        ];
        differs
            .into_iter()
            .filter(|(_, differs)| *differs)
            .map(|(key, _)| key)
            .collect()
    }
}

/// The flags of `nodedockd run` that are configuration. A flag wins over the file.
#[derive(Debug, Default, clap::Args)]
pub struct Flags {
    /// Config file
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Name of this node [default: the one that it had, at first the host name; with --kubernetes there is none]
    #[arg(long, value_name = "NAME", env = "NODEDOCK_NODE_NAME")]
    pub node_name: Option<String>,
    #[command(flatten)]
    pub kubernetes: KubernetesFlags,
    #[command(flatten)]
    pub local_api: LocalApiFlags,
    /// Identity of this instance where several share one root, such as a pod's UID: the newest serves, and the others hand over to it
    #[arg(long, value_name = "UID", env = "NODEDOCK_INSTANCE_UID")]
    pub instance_uid: Option<Uid>,
    /// Directory of the CDI specs; runtimes read /etc/cdi and /var/run/cdi only [default: ROOT/var/run/cdi]
    #[arg(long, value_name = "DIR")]
    pub cdi_dir: Option<PathBuf>,
}

/// Configuration of the daemon.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// Directory below which all paths are.
    pub root: PathBuf,
    pub paths: Paths,
    pub node: NodeName,
    pub cdi: CdiConfig,
    pub claims: ClaimsConfig,
    pub drivers: DriversConfig,
    pub recording: RecordingConfig,
    /// Address on which metrics and probes are served besides the admin socket.
    pub admin_address: Option<SocketAddr>,
    /// None: this is no Kubernetes node.
    pub kubernetes: Option<KubernetesConfig>,
    /// None: claims are named in full by who prepares them.
    pub local_api: Option<LocalApiConfig>,
    /// This run of the daemon among others on the same root, of which one serves and hands over to the next. None: it is alone.
    pub instance: Option<Uid>,
    /// Machine whose devices the node has: this one, or a recorded one.
    pub hardware: Hardware,
    pub file: FileConfig,
}

/// The files that containers read about their devices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CdiConfig {
    /// Mode and group of the files.
    pub access: FileAccess,
    /// Containers get files with the attributes of their devices.
    pub has_metadata: bool,
}

/// The times of a claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ClaimsConfig {
    /// Time for which a prepare waits for another claim to be released from a device.
    pub exclusive_wait: Duration,
    /// Deadline of a driver for a prepare or an unprepare.
    pub call_deadline: Duration,
}

/// Drivers beside those of the drivers directory and the plugins' sockets, and which of all are trusted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DriversConfig {
    /// Directories with one driver each.
    pub images: Vec<DriverImage>,
    /// Device plugins that are DRA drivers, beside those of files.
    pub adapters: Vec<Adapter>,
    /// The host's own driver of devices in CDI specs. `None`: there is none.
    pub cdi: Option<CdiDriverSettings>,
    pub policy: trust::Policy,
}

/// The recordings of drivers' calls.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RecordingConfig {
    /// Drivers and extended resources whose calls are recorded from the start.
    pub drivers: Vec<RecordedName>,
    /// Bytes of the recording of one driver.
    pub bytes_max: u64,
}

/// The config file, which is read again when it changes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileConfig {
    pub path: Option<PathBuf>,
    /// The file as it was at the start.
    pub started: ConfigFile,
}

impl Config {
    /// Puts flags, file and defaults together.
    pub fn new(
        root: &Path,
        socket: Option<PathBuf>,
        flags: Flags,
        file: ConfigFile,
    ) -> Result<Self, SettingsError> {
        let mut paths = Paths::below(root);
        paths.socket = socket.unwrap_or(paths.socket);
        paths.cdi = flags
            .cdi_dir
            .or_else(|| file.cdi_dir.clone())
            .unwrap_or(paths.cdi);
        paths.cdi_spec_dirs = file.cdi_spec_dirs.clone().unwrap_or(paths.cdi_spec_dirs);
        let node_name = flags.node_name.or_else(|| file.node_name.clone());
        // What a file names has the file.
        let path = flags.config.as_deref().unwrap_or(Path::new(""));
        let drivers = DriversConfig {
            images: file.images(path),
            adapters: file.device_plugin_adapters.clone(),
            cdi: file.cdi_driver.resolve(&paths),
            policy: file.policy.clone(),
        };
        let kubernetes = kubernetes::resolve(
            flags.kubernetes,
            &file.kubernetes,
            root,
            node_name.as_deref(),
        )?;
        let node = NodeName::resolve(node_name.as_deref(), &host_name())?;
        let local_api = local_api::resolve(
            &flags.local_api,
            &file.local_api,
            &node.name,
            kubernetes.is_some(),
        )?;
        Ok(Self {
            root: root.to_owned(),
            paths,
            cdi: CdiConfig {
                access: file.cdi_files.resolve()?,
                has_metadata: file.device_metadata.unwrap_or(true),
            },
            kubernetes,
            local_api,
            node,
            claims: ClaimsConfig {
                exclusive_wait: milliseconds(file.claims.exclusive_wait_ms, limit::EXCLUSIVE_WAIT),
                call_deadline: milliseconds(
                    file.claims.call_deadline_ms,
                    limit::CLAIM_CALL_DEADLINE,
                ),
            },
            drivers,
            admin_address: file.admin.listen,
            recording: RecordingConfig {
                drivers: file.recording.drivers.clone(),
                bytes_max: file
                    .recording
                    .max_bytes
                    .unwrap_or(recording::BYTES_MAX_DEFAULT),
            },
            hardware: Hardware::of_node(),
            instance: flags.instance_uid,
            file: FileConfig {
                path: flags.config,
                started: file,
            },
        })
    }
}

fn milliseconds(value: Option<u64>, default: Duration) -> Duration {
    value.map_or(default, Duration::from_millis)
}

fn host_name() -> String {
    rustix::system::uname()
        .nodename()
        .to_string_lossy()
        .into_owned()
}

impl Config {
    /// Gives the node the name that it has.
    pub(crate) fn rename_node(&mut self, name: Option<&ObjectName>) {
        let Some(name) = name else { return };
        self.node.name = name.clone();
        self.local_api
            .iter_mut()
            .for_each(|local| local.node = name.clone());
        self.kubernetes
            .iter_mut()
            .for_each(|kubernetes| kubernetes.node_name = name.clone());
    }

    /// Returns the directories of the daemon and of its orchestrator, and files of the daemon in other directories, of which no container gets
    /// anything.
    pub fn never_mounted(&self) -> Vec<PathBuf> {
        let paths = &self.paths;
        let mut own: Vec<_> = paths
            .own_directories()
            .into_iter()
            .map(Path::to_owned)
            .collect();
        own.extend(
            paths
                .cdi_spec_dirs
                .iter()
                .chain([&paths.cdi, &paths.socket, &paths.users])
                .cloned(),
        );
        own.extend(
            self.kubernetes
                .as_ref()
                .map(|kubernetes| kubernetes.kubelet_root.clone()),
        );
        own.extend(
            self.drivers
                .images
                .iter()
                .map(|image| image.directory.clone()),
        );
        own.extend(self.file.path.clone());
        own.sort();
        own.dedup();
        own
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nodedock_base::error::chain;

    fn parse(text: &str) -> Result<ConfigFile, ConfigError> {
        ConfigFile::parse(text, Path::new("nodedock.yaml"))
    }

    #[test]
    fn config_error_has_its_line() {
        assert_eq!(
            parse("nodeName: n1\n").unwrap().node_name.as_deref(),
            Some("n1")
        );
        let address = "[::1]:9400".parse().unwrap();
        assert_eq!(
            parse("admin: {listen: \"[::1]:9400\"}\n")
                .unwrap()
                .admin
                .listen,
            Some(address)
        );
        let read =
            parse("kubernetes: {enabled: true, kubeletRoot: /k, requestsPerSecond: 5}\n").unwrap();
        assert_eq!(read.kubernetes.requests_per_second, Some(5));
        let many = format!("cdiSpecDirs: [{}]\n", "/x, ".repeat(17));
        for (yaml, parts) in [
            ("nodeName: n1\nnodName: n1\n", ["nodName", "line 2"]),
            (
                "claims: {exclusiveWaitMs: soon}\n",
                ["is not valid", "line 1"],
            ),
            (
                "claims:\n  callDeadlineMs: 1\n",
                ["1 is out of range: 100 to 300000", "line 2"],
            ),
            (
                "admin: {listen: \"localhost:9400\"}\n",
                [
                    "\"localhost:9400\" is not an IP address and a port",
                    "line 1",
                ],
            ),
            (
                "admin: {listen: \"127.0.0.1\"}\n",
                ["is not an IP address and a port", "line 1"],
            ),
            (
                "admin: {listen: \"\"}\n",
                ["is not an IP address and a port", "line 1"],
            ),
            ("admin: {listen: \"127.0.0.1:0\"}\n", ["port 0", "line 1"]),
            ("admin: {port: 9400}\n", ["port", "line 1"]),
            (
                "cdiSpecDirs: [/etc/cdi, run/cdi]\n",
                ["\"run/cdi\" is not an absolute path", "line 1"],
            ),
            (&many, ["17 directories", "line 1"]),
            (
                "trust:\n  keys:\n  - {name: a, pem: x}\n",
                ["the config nodedock.yaml: line 3", "key a"],
            ),
            (
                "kubernetes: {requestsPerSecond: 0}\n",
                ["0 is out of range", "line 1"],
            ),
            (
                "kubernetes: {requestBurst: 100000}\n",
                ["100000 is out of range", "line 1"],
            ),
            (
                "kubernetes: {kubeletRoot: var/lib}\n",
                ["\"var/lib\" is not an absolute path", "line 1"],
            ),
            (
                "kubernetes: {kubeconfig: admin.conf}\n",
                ["\"admin.conf\" is not an absolute path", "line 1"],
            ),
            ("kubernetes: {kubeletroot: /k}\n", ["kubeletroot", "line 1"]),
            (
                "cdiFiles: {mode: \"0666\"}\n",
                ["cdiFiles.mode: \"0666\" is none of", "line 1"],
            ),
            (
                "cdiFiles: {mode: \"0440\"}\n",
                ["cdiFiles.mode: \"0440\" is none of", "line 1"],
            ),
            (
                "cdiFiles: {mode: \"rw-r--r--\"}\n",
                ["cdiFiles.mode: \"rw-r--r--\" is none of", "line 1"],
            ),
            (
                "cdiFiles: {mode: \"00644\"}\n",
                ["cdiFiles.mode: \"00644\" is none of", "line 1"],
            ),
            ("cdiFiles:\n  mode: [6]\n", ["is not valid", "line 2"]),
            (
                "cdiFiles: {group: \"\"}\n",
                ["cdiFiles.group: it is empty", "line 1"],
            ),
            ("cdiFiles: {owner: root}\n", ["owner", "line 1"]),
            (
                "recording: {drivers: [gpu.example.com], maxBytes: 1}\n",
                ["1 is out of range", "line 1"],
            ),
            (
                "recording:\n  drivers: [\"../gpu\"]\n",
                ["../gpu", "line 2"],
            ),
            (
                "recording: {driver: gpu.example.com}\n",
                ["driver", "line 1"],
            ),
        ] {
            let error = chain(&parse(yaml).unwrap_err());
            assert!(
                error.contains("nodedock.yaml") && parts.iter().all(|part| error.contains(part)),
                "{error}"
            );
        }
    }

    #[test]
    fn trust_change_needs_no_restart() {
        let parse = |text| parse(text).unwrap();
        let started = parse("nodeName: n1\n");
        assert_eq!(
            parse("nodeName: n1\ntrust: {mode: warn}\n").needs_restart(&started),
            [""; 0]
        );
        let live = parse(
            "nodeName: n1\nrecording: {drivers: [gpu.example.com]}\nkubernetes: {evictUnhealthyAfterSeconds: 5, bindingConditions: [{driver: gpu.example.com}]}\n",
        );
        assert_eq!(live.needs_restart(&started), [""; 0]);
        let at_start =
            parse("nodeName: n1\nrecording: {maxBytes: 70000}\nkubernetes: {requestBurst: 5}\n");
        assert_eq!(
            at_start.needs_restart(&started),
            ["kubernetes", "recording.maxBytes"]
        );
        let other = parse(
            "claims: {exclusiveWaitMs: 5}\ncdiDir: /x\nadmin: {listen: \"127.0.0.1:9400\"}\n",
        );
        assert_eq!(
            other.needs_restart(&started),
            ["nodeName", "cdiDir", "claims", "admin"]
        );
    }

    #[test]
    fn flags_override_file_and_defaults() {
        let config =
            |flags, yaml| Config::new(Path::new("/r"), None, flags, parse(yaml).unwrap()).unwrap();
        let flags = || Flags {
            cdi_dir: Some("/from/flag".into()),
            ..Flags::default()
        };
        let plain = config(Flags::default(), "");
        assert_eq!(
            (plain.paths.cdi, plain.admin_address),
            ("/r/var/run/cdi".into(), None)
        );
        assert_eq!(
            plain.paths.cdi_spec_dirs,
            ["/r/etc/cdi", "/r/var/run/cdi"].map(PathBuf::from)
        );
        let file = "{cdiDir: /from/file, cdiSpecDirs: [/x], admin: {listen: \"127.0.0.1:9400\"}}";
        let from_file = config(Flags::default(), file);
        assert_eq!(from_file.paths.cdi, Path::new("/from/file"));
        assert_eq!(from_file.paths.cdi_spec_dirs, [PathBuf::from("/x")]);
        assert_eq!(from_file.admin_address, Some(([127, 0, 0, 1], 9400).into()));
        assert_eq!(config(flags(), file).paths.cdi, Path::new("/from/flag"));
    }
}
