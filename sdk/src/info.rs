//! The driver's identity and the capabilities that it requests.

/// Permission to write values that match `pattern` to the files below `/sys` that match `glob`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WriteRequest {
    /// Files, relative to `/sys`.
    pub glob: String,
    /// Regular expression that the whole written value must match.
    pub pattern: String,
}

/// Permission to bind the PCI functions that match `functions` to the kernel drivers that match `drivers`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BindRequest {
    /// Glob of addresses, such as `0000:3b:00.*`.
    pub functions: String,
    /// Regular expression that the whole name of the kernel driver must match.
    pub drivers: String,
}

/// Capabilities that a driver requests. Every list contains globs in which `*` stays within one path segment and `**` does not.
///
/// The operator's grant must cover all of them; otherwise the driver stays `blocked`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Capabilities {
    /// Paths to read, relative to `/sys`, as the driver names them (the host follows links).
    pub sysfs_read: Vec<String>,
    /// Files to write, relative to `/sys`, and patterns for the values.
    pub sysfs_write: Vec<WriteRequest>,
    /// Files to read outside `/sys` and `/dev`, such as `/proc/driver/nvidia/**`.
    pub host_files: Vec<String>,
    /// PCI functions to bind, and to which kernel drivers.
    pub pci_driver: Vec<BindRequest>,
    /// Device nodes to inspect and to give to containers, such as `/dev/dri/*`.
    pub device_nodes: Vec<String>,
    /// Directories and files of the node to mount into containers.
    pub mounts: Vec<String>,
    /// Programs of the node to run as hooks. Operators rarely grant any.
    pub hooks: Vec<String>,
    /// Names of environment variables to set, such as `GPU_*`.
    pub env: Vec<String>,
    /// Network interfaces to look at and to move into containers.
    pub net_devices: Vec<String>,
}

/// Limits that the driver requests; the operator's grant and the host's ceiling take precedence. `None` is the host's default.
///
/// ```
/// use nodedock_sdk::{DriverInfo, Limits};
///
/// let limits = Limits { memory_mib: Some(128), wall_ms: Some(20_000), ..Limits::default() };
/// let info = DriverInfo::new("gpu.example.com", "0.1.0").limits(limits);
/// assert_eq!(info.limits.cpu_ms, None);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Limits {
    /// Memory of one call, in MiB.
    pub memory_mib: Option<u32>,
    /// Elapsed time of one call, in milliseconds.
    pub wall_ms: Option<u32>,
    /// CPU time of one call, in milliseconds.
    pub cpu_ms: Option<u32>,
    /// Calls at the same time. 1: all calls of the driver run one after the other.
    pub concurrent_calls: Option<u32>,
}

/// The driver's identity and the capabilities that it requests.
///
/// ```
/// use nodedock_sdk::DriverInfo;
///
/// let info = DriverInfo::new("leds.example.com", env!("CARGO_PKG_VERSION"))
///     .summary("LEDs of the node's front panel")
///     .sysfs_read(["class/leds/*", "class/leds/*/max_brightness"])
///     .env(["LED_*"])
///     .events(["leds"]);
/// assert_eq!(info.capabilities.env, ["LED_*"]);
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DriverInfo {
    /// DNS subdomain of at most 63 bytes; the name of the DRA driver.
    pub name: String,
    /// Semantic version of the driver; `env!("CARGO_PKG_VERSION")` is one.
    pub version: String,
    /// One line for lists of drivers, at most 1 KiB.
    pub summary: String,
    /// Requested capabilities.
    pub capabilities: Capabilities,
    /// Requested limits.
    pub limits: Limits,
    /// Kernel subsystems whose events trigger a discovery, such as `pci`, `net`, `drm`.
    pub event_subsystems: Vec<String>,
    /// Seconds between discoveries without events; `None` is the host's default.
    pub discovery_period_seconds: Option<u32>,
    /// Annotations for people and tools.
    pub annotations: Vec<(String, String)>,
}

impl DriverInfo {
    /// Creates a description without any capabilities.
    pub fn new(name: impl Into<String>, version: impl Into<String>) -> Self {
        DriverInfo {
            name: name.into(),
            version: version.into(),
            ..Self::default()
        }
    }

    /// Sets the summary: one line for lists of drivers, at most 1 KiB.
    #[must_use]
    pub fn summary(mut self, summary: impl Into<String>) -> Self {
        self.summary = summary.into();
        self
    }

    /// Requests to read below `/sys`; globs relative to `/sys`, matched against the paths that the driver names.
    #[must_use]
    pub fn sysfs_read<S: Into<String>>(mut self, globs: impl IntoIterator<Item = S>) -> Self {
        self.capabilities
            .sysfs_read
            .extend(globs.into_iter().map(Into::into));
        self
    }

    /// Requests to write values that match the whole `pattern` to the files below `/sys` that match `glob`.
    #[must_use]
    pub fn sysfs_write(mut self, glob: impl Into<String>, pattern: impl Into<String>) -> Self {
        self.capabilities.sysfs_write.push(WriteRequest {
            glob: glob.into(),
            pattern: pattern.into(),
        });
        self
    }

    /// Requests to read files outside `/sys` and `/dev`; absolute globs within the host's ceiling (`/proc/driver`, `/usr/lib*`, `/opt`, …).
    #[must_use]
    pub fn host_files<S: Into<String>>(mut self, globs: impl IntoIterator<Item = S>) -> Self {
        self.capabilities
            .host_files
            .extend(globs.into_iter().map(Into::into));
        self
    }

    /// Requests to bind the PCI functions whose address matches `functions` to the kernel drivers that match the whole pattern `drivers`.
    #[must_use]
    pub fn pci_driver(mut self, functions: impl Into<String>, drivers: impl Into<String>) -> Self {
        self.capabilities.pci_driver.push(BindRequest {
            functions: functions.into(),
            drivers: drivers.into(),
        });
        self
    }

    /// Requests to inspect device nodes and to give them to containers; absolute globs.
    #[must_use]
    pub fn device_nodes<S: Into<String>>(mut self, globs: impl IntoIterator<Item = S>) -> Self {
        self.capabilities
            .device_nodes
            .extend(globs.into_iter().map(Into::into));
        self
    }

    /// Requests to mount directories and files of the node; absolute globs.
    #[must_use]
    pub fn mounts<S: Into<String>>(mut self, globs: impl IntoIterator<Item = S>) -> Self {
        self.capabilities
            .mounts
            .extend(globs.into_iter().map(Into::into));
        self
    }

    /// Requests to run programs of the node as hooks; absolute paths.
    #[must_use]
    pub fn hooks<S: Into<String>>(mut self, paths: impl IntoIterator<Item = S>) -> Self {
        self.capabilities
            .hooks
            .extend(paths.into_iter().map(Into::into));
        self
    }

    /// Requests to set environment variables; names or globs.
    #[must_use]
    pub fn env<S: Into<String>>(mut self, names: impl IntoIterator<Item = S>) -> Self {
        self.capabilities
            .env
            .extend(names.into_iter().map(Into::into));
        self
    }

    /// Requests to look at network interfaces and to move them into containers; names or globs.
    #[must_use]
    pub fn net_devices<S: Into<String>>(mut self, names: impl IntoIterator<Item = S>) -> Self {
        self.capabilities
            .net_devices
            .extend(names.into_iter().map(Into::into));
        self
    }

    /// Requests limits.
    #[must_use]
    pub fn limits(mut self, limits: Limits) -> Self {
        self.limits = limits;
        self
    }

    /// Requests that all calls of the driver run one after the other, for a driver whose claims share something on the node.
    #[must_use]
    pub fn one_call_at_a_time(mut self) -> Self {
        self.limits.concurrent_calls = Some(1);
        self
    }

    /// Sets the kernel subsystems whose events trigger a discovery.
    #[must_use]
    pub fn events<S: Into<String>>(mut self, subsystems: impl IntoIterator<Item = S>) -> Self {
        self.event_subsystems
            .extend(subsystems.into_iter().map(Into::into));
        self
    }

    /// Sets the seconds between discoveries without events.
    #[must_use]
    pub fn discovery_period_seconds(mut self, seconds: u32) -> Self {
        self.discovery_period_seconds = Some(seconds);
        self
    }

    /// Adds an annotation for people and tools: `nodedock driver inspect` shows it.
    #[must_use]
    pub fn annotation(mut self, key: impl Into<String>, value: impl Into<String>) -> Self {
        self.annotations.push((key.into(), value.into()));
        self
    }
}
