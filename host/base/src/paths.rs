//! Paths of the node program's files and sockets below its root.

use std::path::{Path, PathBuf};

use nodedock_model::Uid;

/// Paths of the daemon's files and sockets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Paths {
    pub root: PathBuf,
    pub drivers: PathBuf,
    /// Registration sockets of native plugins.
    pub plugins_registry: PathBuf,
    /// The socket on which device plugins register, and theirs beside it.
    pub device_plugins: PathBuf,
    /// Files of drivers that prepared claims, by digest.
    pub kept_drivers: PathBuf,
    /// Recordings of drivers' calls.
    pub recordings: PathBuf,
    pub checkpoint: PathBuf,
    pub claims: PathBuf,
    /// Files of DeviceClasses of the local API.
    pub device_classes: PathBuf,
    pub cache: PathBuf,
    /// Seals the files of the cache.
    pub cache_key: PathBuf,
    pub socket: PathBuf,
    /// Socket of the pod-resources API, with the name that its clients expect.
    pub pod_resources: PathBuf,
    /// Socket of metrics and probes, beside that of the node API.
    pub admin: PathBuf,
    /// Socket of the local API, and what clients on its address know it by.
    pub api: PathBuf,
    pub api_identity: PathBuf,
    /// Sockets for users other than the daemon's, as those of the node API and of the local API.
    pub users: PathBuf,
    /// Locked by the instance that serves, where there may be several.
    pub instance_lock: PathBuf,
    /// The instances that were started on this root, the newest last.
    pub instances: PathBuf,
    /// Socket at which a newer instance requests the handover from the one that serves.
    pub handover: PathBuf,
    pub cdi: PathBuf,
    /// Directories in which runtimes look for specs, by priority; `cdi` is read as well.
    pub cdi_spec_dirs: Vec<PathBuf>,
    /// A recorded machine, if the daemon runs on one.
    pub hardware: PathBuf,
}

impl Paths {
    /// Returns what identifies this daemon in CDI files, since several daemons may write to one directory: the path of its checkpoint.
    pub fn identity(&self) -> String {
        self.checkpoint.to_string_lossy().into_owned()
    }

    /// Returns the default paths below a root.
    pub fn below(root: &Path) -> Self {
        Self {
            root: root.to_owned(),
            drivers: root.join("var/lib/nodedock/drivers"),
            hardware: root.join("run/nodedock/hardware"),
            plugins_registry: root.join("var/lib/nodedock/plugins_registry"),
            device_plugins: root.join("var/lib/nodedock/device-plugins"),
            kept_drivers: root.join("var/lib/nodedock/kept-drivers"),
            recordings: root.join("var/lib/nodedock/recordings"),
            checkpoint: root.join("var/lib/nodedock/checkpoint.db"),
            claims: root.join("var/lib/nodedock/claims"),
            device_classes: root.join("var/lib/nodedock/deviceclasses"),
            cache: root.join("var/cache/nodedock"),
            cache_key: root.join("var/lib/nodedock/cache.key"),
            socket: root.join("run/nodedock/nodedock.sock"),
            pod_resources: root.join("run/nodedock/pod-resources/kubelet.sock"),
            admin: root.join("run/nodedock/admin.sock"),
            api: root.join("run/nodedock/api.sock"),
            api_identity: root.join("var/lib/nodedock/api-identity.json"),
            users: root.join("run/nodedock-users"),
            instance_lock: root.join("var/lib/nodedock/instance.lock"),
            instances: root.join("var/lib/nodedock/instances"),
            handover: root.join("run/nodedock/handover.sock"),
            cdi: root.join("var/run/cdi"),
            cdi_spec_dirs: vec![root.join("etc/cdi"), root.join("var/run/cdi")],
        }
    }

    /// The directories of the daemon, which only its user may enter.
    pub fn own_directories(&self) -> Vec<&Path> {
        let state = self.checkpoint.parent();
        let of_sockets = [self.admin.parent(), self.pod_resources.parent()];
        let below = [
            &self.drivers,
            &self.plugins_registry,
            &self.device_plugins,
            &self.kept_drivers,
            &self.recordings,
            &self.claims,
            &self.device_classes,
            &self.cache,
        ];
        state
            .into_iter()
            .chain(of_sockets.into_iter().flatten())
            .chain(below.map(AsRef::as_ref))
            .collect()
    }

    /// Returns the socket on which an instance answers probes about itself, whichever instance serves.
    pub fn probes_of(&self, instance: &Uid) -> PathBuf {
        self.admin
            .with_file_name(format!("{INSTANCE_PROBES}{instance}.sock"))
    }
}

/// Prefix of the names of the instances' own sockets for probes.
pub const INSTANCE_PROBES: &str = "admin-";
