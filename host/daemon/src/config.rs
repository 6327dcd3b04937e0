//! Configuration: the daemon's own (flags over file over defaults), and what operators write for drivers.
//!
//! Only values: paths are derived here, and nothing is created or opened but the file that is read, and the keys that it names.

mod kubernetes;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Deserialize;

use nodedock_model::{Uid, limit};
use nodedock_wasm::trust;

pub use kubernetes::{KubernetesConfig, KubernetesError, KubernetesFlags, KubernetesSection, OwnPodName};

/// The daemon's config file. Every key may be absent.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct ConfigFile {
    /// Name of this node; the machine's host name unless set.
    pub node_name: Option<String>,
    /// Where CDI specs are written.
    pub cdi_dir: Option<PathBuf>,
    /// Folders in which container runtimes look for CDI specs, by priority, as in their own configs.
    pub cdi_spec_dirs: Option<Vec<PathBuf>>,
    pub claims: ClaimsSection,
    pub admin: AdminSection,
    pub kubernetes: KubernetesSection,
    /// As it is written; `policy` is what counts.
    trust: trust::Section,
    /// The checked `trust` section with its keys.
    #[serde(skip)]
    pub policy: trust::Policy,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct AdminSection {
    /// IP address and port on which metrics and probes are answered besides the admin socket; none unless set. Whoever reaches it is
    /// answered.
    pub listen: Option<String>,
}

impl AdminSection {
    fn address(&self) -> Option<Result<SocketAddr, AddressError>> {
        self.listen.as_ref().map(|text| parse_address(text))
    }
}

/// Why a text is no address to listen on.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum AddressError {
    #[error("an IP address and a port are wanted, such as 127.0.0.1:9400 or [::1]:9400")]
    NotAnAddress,
    #[error("port 0 is none: nobody would know where to ask")]
    NoPort,
}

fn parse_address(text: &str) -> Result<SocketAddr, AddressError> {
    let address: SocketAddr = text.parse().map_err(|_| AddressError::NotAnAddress)?;
    if address.port() == 0 { Err(AddressError::NoPort) } else { Ok(address) }
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct ClaimsSection {
    /// Milliseconds that a prepare waits for the holder of a device.
    pub exclusive_wait_ms: Option<u64>,
    /// Milliseconds that a driver has for a prepare or an unprepare.
    pub call_deadline_ms: Option<u64>,
}

#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    #[error("read the config {}", path.display())]
    Read { path: PathBuf, source: std::io::Error },
    #[error("the config {} is not valid", path.display())]
    Parse { path: PathBuf, source: Box<serde_saphyr::Error> },
    #[error("the config {}: {key} is {value}, and {min} to {max} are allowed", path.display())]
    Range { path: PathBuf, key: &'static str, value: u64, min: u64, max: u64 },
    #[error("the config {}: cdiSpecDirs has {} folders, and at most {} are allowed", path.display(), folders, limit::CDI_FOLDERS_MAX)]
    SpecFolders { path: PathBuf, folders: usize },
    #[error("the config {}: cdiSpecDirs has {:?}, and absolute paths are wanted", path.display(), folder)]
    SpecFolder { path: PathBuf, folder: PathBuf },
    #[error("the config {}: admin.listen is {value:?}", path.display())]
    Address { path: PathBuf, value: String, source: AddressError },
    #[error("the config {}: {key} is {value:?}, and an absolute path is wanted", path.display())]
    RelativePath { path: PathBuf, key: &'static str, value: PathBuf },
    #[error("the config {}", path.display())]
    Trust { path: PathBuf, source: Box<trust::SectionError> },
}

impl ConfigFile {
    /// Reads and checks a file. Unknown keys and wrong types are errors with line and column.
    pub fn read(path: &Path) -> Result<Self, ConfigError> {
        let text = std::fs::read_to_string(path)
            .map_err(|source| ConfigError::Read { path: path.to_owned(), source })?;
        Self::parse(&text, path)
    }

    pub(crate) fn parse(text: &str, path: &Path) -> Result<Self, ConfigError> {
        let invalid = |error| ConfigError::Parse { path: path.to_owned(), source: Box::new(error) };
        let mut config: Self = serde_saphyr::from_str(text).map_err(invalid)?;
        let check = |key, value: Option<u64>, min, max| match value {
            Some(value) if !(min..=max).contains(&value) => {
                Err(ConfigError::Range { path: path.to_owned(), key, value, min, max })
            }
            _ => Ok(()),
        };
        check("claims.exclusiveWaitMs", config.claims.exclusive_wait_ms, 0, 60_000)?;
        check("claims.callDeadlineMs", config.claims.call_deadline_ms, 100, 300_000)?;
        if let Some((key, value, min, max)) = config.kubernetes.out_of_range() {
            return Err(ConfigError::Range { path: path.to_owned(), key, value, min, max });
        }
        if let Some((key, value)) = config.kubernetes.relative_path() {
            return Err(ConfigError::RelativePath { path: path.to_owned(), key, value: value.to_owned() });
        }
        if let Some(Err(source)) = config.admin.address() {
            let value = config.admin.listen.unwrap_or_default();
            return Err(ConfigError::Address { path: path.to_owned(), value, source });
        }
        check_spec_dirs(config.cdi_spec_dirs.as_deref().unwrap_or_default(), path)?;
        let policy = config.trust.check(path.parent().unwrap_or(path));
        let wrong = |source| ConfigError::Trust { path: path.to_owned(), source: Box::new(source) };
        config.policy = policy.map_err(wrong)?;
        Ok(config)
    }

    /// The keys of the file that differ from another's and are looked at when the daemon starts only.
    pub fn needs_restart(&self, started: &Self) -> Vec<&'static str> {
        let differs = [
            ("nodeName", self.node_name != started.node_name),
            ("cdiDir", self.cdi_dir != started.cdi_dir),
            ("cdiSpecDirs", self.cdi_spec_dirs != started.cdi_spec_dirs),
            ("claims", self.claims != started.claims),
            ("admin", self.admin != started.admin),
            ("kubernetes", self.kubernetes != started.kubernetes),
        ];
        differs.into_iter().filter(|(_, differs)| *differs).map(|(key, _)| key).collect()
    }
}

fn check_spec_dirs(folders: &[PathBuf], path: &Path) -> Result<(), ConfigError> {
    if folders.len() > limit::CDI_FOLDERS_MAX {
        return Err(ConfigError::SpecFolders { path: path.to_owned(), folders: folders.len() });
    }
    match folders.iter().find(|folder| !folder.is_absolute()) {
        Some(folder) => Err(ConfigError::SpecFolder { path: path.to_owned(), folder: folder.clone() }),
        None => Ok(()),
    }
}

/// What the daemon runs with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    pub paths: Paths,
    pub node_name: String,
    pub exclusive_wait: Duration,
    pub call_deadline: Duration,
    /// Where metrics and probes are answered besides the admin socket.
    pub admin_address: Option<SocketAddr>,
    /// None: this is no Kubernetes node.
    pub kubernetes: Option<KubernetesConfig>,
    /// This run of the daemon among others on the same root, of which one serves and hands over to the next. None: it is alone.
    pub instance: Option<Uid>,
    /// The config file as it was at the start.
    pub file: ConfigFile,
    /// Where it is; it is read again when it changes.
    pub file_path: Option<PathBuf>,
}

impl Config {
    /// Puts the file's values and the defaults together. `cdi_dir` and `node_name` are flags, and win over the file.
    pub fn new(
        root: &Path,
        socket: Option<PathBuf>,
        cdi_dir: Option<PathBuf>,
        node_name: String,
        file: &ConfigFile,
    ) -> Self {
        let mut paths = Paths::below(root);
        paths.socket = socket.unwrap_or(paths.socket);
        paths.cdi = cdi_dir.or_else(|| file.cdi_dir.clone()).unwrap_or(paths.cdi);
        paths.cdi_spec_dirs = file.cdi_spec_dirs.clone().unwrap_or(paths.cdi_spec_dirs);
        let milliseconds = |value: Option<u64>, default| value.map_or(default, Duration::from_millis);
        Self {
            paths,
            node_name,
            exclusive_wait: milliseconds(file.claims.exclusive_wait_ms, limit::EXCLUSIVE_WAIT),
            call_deadline: milliseconds(file.claims.call_deadline_ms, limit::CLAIM_CALL_DEADLINE),
            admin_address: file.admin.address().and_then(Result::ok),
            kubernetes: None,
            instance: None,
            file: file.clone(),
            file_path: None,
        }
    }

    /// Makes it one of a Kubernetes node if flags or file say so. `node_name`: as it was given, not the host's.
    pub fn join_cluster(
        &mut self,
        flags: KubernetesFlags,
        root: &Path,
        node_name: Option<&str>,
    ) -> Result<(), KubernetesError> {
        self.kubernetes = kubernetes::resolve(flags, &self.file.kubernetes, root, node_name)?;
        Ok(())
    }
}

/// Where everything is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Paths {
    pub drivers: PathBuf,
    /// Registration sockets of native plugins.
    pub plugins_registry: PathBuf,
    /// The socket on which device plugins register, and theirs beside it.
    pub device_plugins: PathBuf,
    /// Files of drivers that prepared claims, by digest.
    pub kept_drivers: PathBuf,
    pub checkpoint: PathBuf,
    pub claims: PathBuf,
    pub cache: PathBuf,
    pub socket: PathBuf,
    /// Socket of the pod-resources API, under the name that its clients know.
    pub pod_resources: PathBuf,
    /// Socket of metrics and probes, beside that of the node API.
    pub admin: PathBuf,
    /// Held by the instance that serves, where there may be several.
    pub instance_lock: PathBuf,
    /// The instances that were here, the newest last.
    pub instances: PathBuf,
    /// Where the instance that serves is asked to hand over.
    pub handover: PathBuf,
    /// Names of drivers, and devices under names of resources, as they were offered to the kubelet last.
    pub offered_drivers: PathBuf,
    pub offered_devices: PathBuf,
    pub cdi: PathBuf,
    /// Where runtimes look for specs, by priority; `cdi` is read as well.
    pub cdi_spec_dirs: Vec<PathBuf>,
}

impl Paths {
    /// The default places below a root.
    pub fn below(root: &Path) -> Self {
        Self {
            drivers: root.join("var/lib/nodedock/drivers"),
            plugins_registry: root.join("var/lib/nodedock/plugins_registry"),
            device_plugins: root.join("var/lib/nodedock/device-plugins"),
            kept_drivers: root.join("var/lib/nodedock/kept-drivers"),
            checkpoint: root.join("var/lib/nodedock/checkpoint.redb"),
            claims: root.join("var/lib/nodedock/claims"),
            cache: root.join("var/cache/nodedock"),
            socket: root.join("run/nodedock/nodedock.sock"),
            pod_resources: root.join("run/nodedock/pod-resources/kubelet.sock"),
            admin: root.join("run/nodedock/admin.sock"),
            instance_lock: root.join("var/lib/nodedock/instance.lock"),
            instances: root.join("var/lib/nodedock/instances"),
            handover: root.join("run/nodedock/handover.sock"),
            offered_drivers: root.join("var/lib/nodedock/bridge-drivers"),
            offered_devices: root.join("var/lib/nodedock/bridge-devices.json"),
            cdi: root.join("var/run/cdi"),
            cdi_spec_dirs: vec![root.join("etc/cdi"), root.join("var/run/cdi")],
        }
    }

    /// Where an instance answers probes about itself, whichever serves.
    pub fn probes_of(&self, instance: &Uid) -> PathBuf {
        self.admin.with_file_name(format!("{INSTANCE_PROBES}{instance}.sock"))
    }
}

/// How the names of the instances' own sockets for probes begin.
pub const INSTANCE_PROBES: &str = "admin-";

#[cfg(test)]
mod tests {
    use super::*;
    use nodedock_base::error::chain;

    #[test]
    fn unknown_keys_wrong_types_and_values_out_of_range_are_named() {
        let parse = |text| ConfigFile::parse(text, Path::new("nodedock.yaml"));
        assert_eq!(parse("nodeName: n1\n").unwrap().node_name.as_deref(), Some("n1"));
        let error = chain(&parse("nodeName: n1\nnodName: n1\n").unwrap_err());
        assert!(error.contains("nodName") && error.contains("line 2"), "{error}");
        let error = chain(&parse("claims: {exclusiveWaitMs: soon}\n").unwrap_err());
        assert!(error.contains("line 1"), "{error}");
        let error = chain(&parse("claims: {callDeadlineMs: 1}\n").unwrap_err());
        assert!(error.contains("claims.callDeadlineMs is 1"), "{error}");
        assert_eq!(
            parse("admin: {listen: \"[::1]:9400\"}\n").unwrap().admin.listen.as_deref(),
            Some("[::1]:9400")
        );
        for (text, wanted) in [
            ("localhost:9400", "an IP address and a port are wanted"),
            ("127.0.0.1", "an IP address and a port are wanted"),
            ("127.0.0.1:0", "port 0 is none"),
            ("", "an IP address and a port are wanted"),
        ] {
            let yaml = format!("admin: {{listen: \"{text}\"}}\n");
            let error = chain(&ConfigFile::parse(&yaml, Path::new("nodedock.yaml")).unwrap_err());
            assert!(
                error.contains(&format!("admin.listen is {text:?}")) && error.contains(wanted),
                "{error}"
            );
        }
        let error = chain(&parse("admin: {port: 9400}\n").unwrap_err());
        assert!(error.contains("port") && error.contains("line 1"), "{error}");
        let error = chain(&parse("cdiSpecDirs: [/etc/cdi, run/cdi]\n").unwrap_err());
        assert!(error.contains("\"run/cdi\""), "{error}");
        let error = chain(&parse("trust:\n  keys:\n  - {name: a, pem: x}\n").unwrap_err());
        assert!(error.contains("the config nodedock.yaml: line 3") && error.contains("key a"), "{error}");
        let error = chain(&parse(&format!("cdiSpecDirs: [{}]\n", "/x, ".repeat(17))).unwrap_err());
        assert!(error.contains("has 17 folders"), "{error}");
    }

    #[test]
    fn the_section_of_kubernetes_is_checked_with_the_file() {
        let parse = |text| ConfigFile::parse(text, Path::new("nodedock.yaml"));
        let read = parse("kubernetes: {enabled: true, kubeletRoot: /k, requestsPerSecond: 5}\n").unwrap();
        assert_eq!(read.kubernetes.requests_per_second, Some(5));
        for (text, wanted) in [
            ("{requestsPerSecond: 0}", "kubernetes.requestsPerSecond is 0"),
            ("{requestBurst: 100000}", "kubernetes.requestBurst is 100000"),
            ("{kubeletRoot: var/lib}", "kubernetes.kubeletRoot is \"var/lib\""),
            ("{kubeconfig: admin.conf}", "kubernetes.kubeconfig is \"admin.conf\""),
            ("{kubeletroot: /k}", "kubeletroot"),
        ] {
            let yaml = format!("kubernetes: {text}\n");
            let error = chain(&ConfigFile::parse(&yaml, Path::new("nodedock.yaml")).unwrap_err());
            assert!(error.contains(wanted) && error.contains("nodedock.yaml"), "{error}");
        }
    }

    #[test]
    fn what_needs_a_restart_is_known_by_its_keys_and_trust_is_not_among_them() {
        let parse = |text| ConfigFile::parse(text, Path::new("nodedock.yaml")).unwrap();
        let started = parse("nodeName: n1\n");
        assert_eq!(parse("nodeName: n1\ntrust: {mode: warn}\n").needs_restart(&started), [""; 0]);
        let other = parse("claims: {exclusiveWaitMs: 5}\ncdiDir: /x\nadmin: {listen: \"127.0.0.1:9400\"}\n");
        assert_eq!(other.needs_restart(&started), ["nodeName", "cdiDir", "claims", "admin"]);
    }

    #[test]
    fn flags_win_over_the_file_and_the_file_over_defaults() {
        let file = ConfigFile { cdi_dir: Some("/from/file".into()), ..Default::default() };
        let config = |flag| Config::new(Path::new("/r"), None, flag, "n".to_owned(), &file).paths.cdi;
        assert_eq!(config(None), Path::new("/from/file"));
        assert_eq!(config(Some("/from/flag".into())), Path::new("/from/flag"));
        assert_eq!(Config::new(Path::new("/r"), None, None, "n".to_owned(), &file).admin_address, None);
        let admin = AdminSection { listen: Some("127.0.0.1:9400".to_owned()) };
        let listening = ConfigFile { admin, ..ConfigFile::default() };
        let listening = Config::new(Path::new("/r"), None, None, "n".to_owned(), &listening);
        assert_eq!(listening.admin_address, Some(([127, 0, 0, 1], 9400).into()));
        let plain = Config::new(Path::new("/r"), None, None, "n".to_owned(), &ConfigFile::default());
        assert_eq!(plain.paths.cdi, Path::new("/r/var/run/cdi"));
        assert_eq!(plain.paths.cdi_spec_dirs, ["/r/etc/cdi", "/r/var/run/cdi"].map(PathBuf::from));
        let file = ConfigFile { cdi_spec_dirs: Some(vec!["/x".into()]), ..Default::default() };
        let config = Config::new(Path::new("/r"), None, None, "n".to_owned(), &file);
        assert_eq!(config.paths.cdi_spec_dirs, [PathBuf::from("/x")]);
    }
}
