//! Who a driver is and what it asks for.

/// Permission to write values that match `pattern` to the files below `/sys` that match `glob`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ValueGrant {
    /// Files, relative to `/sys`.
    pub glob: String,
    /// Regular expression that a written value must match as a whole.
    pub pattern: String,
}

/// What a driver asks the operator for. Every list holds globs in which `*` stays within one path segment and `**` does not.
///
/// The host demands that the operator's grant covers all of it: what the grant lacks keeps the driver `blocked`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Capabilities {
    /// Paths to read, relative to `/sys`, as the driver names them (links are followed by the host).
    pub sysfs_read: Vec<String>,
    /// Files to write, relative to `/sys`, and what may be written.
    pub sysfs_write: Vec<ValueGrant>,
    /// Device nodes to look at and to hand out, such as `/dev/dri/*`.
    pub device_nodes: Vec<String>,
    /// Folders and files of the node to mount into containers.
    pub mounts: Vec<String>,
    /// Programs of the node to run as hooks. Operators rarely grant any.
    pub hooks: Vec<String>,
    /// Names of environment variables to set, such as `GPU_*`.
    pub env: Vec<String>,
    /// Network interfaces to move into containers.
    pub net_devices: Vec<String>,
}

/// Limits that the driver thinks right for itself; the operator's grant and the host's ceiling win. None is the host's default.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Limits {
    /// Memory of one call, in MiB.
    pub memory_mib: Option<u32>,
    /// Wall clock of one call, in milliseconds.
    pub wall_ms: Option<u32>,
    /// Time on a processor of one call, in milliseconds.
    pub cpu_ms: Option<u32>,
}

/// Who a driver is and what it asks for.
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
    /// What it asks the operator for.
    pub capabilities: Capabilities,
    /// Limits that it thinks right for itself.
    pub limits: Limits,
    /// Kernel subsystems whose events call for a discovery, such as `pci`, `net`, `drm`.
    pub event_subsystems: Vec<String>,
    /// Seconds between discoveries without events; none leaves it to the host.
    pub discovery_period_seconds: Option<u32>,
    /// Free facts for people and tools.
    pub annotations: Vec<(String, String)>,
}

impl DriverInfo {
    /// A driver that asks for nothing yet.
    pub fn new(name: impl Into<String>, version: impl Into<String>) -> Self {
        DriverInfo { name: name.into(), version: version.into(), ..Self::default() }
    }

    /// One line for lists of drivers.
    #[must_use]
    pub fn summary(mut self, summary: impl Into<String>) -> Self {
        self.summary = summary.into();
        self
    }

    /// Asks to read below `/sys`; globs relative to it, matched against the paths that the driver names.
    #[must_use]
    pub fn sysfs_read<S: Into<String>>(mut self, globs: impl IntoIterator<Item = S>) -> Self {
        self.capabilities.sysfs_read.extend(globs.into_iter().map(Into::into));
        self
    }

    /// Asks to write values that match `pattern` as a whole to the files below `/sys` that match `glob`.
    #[must_use]
    pub fn sysfs_write(mut self, glob: impl Into<String>, pattern: impl Into<String>) -> Self {
        self.capabilities.sysfs_write.push(ValueGrant { glob: glob.into(), pattern: pattern.into() });
        self
    }

    /// Asks to look at device nodes and to hand them out; absolute globs.
    #[must_use]
    pub fn device_nodes<S: Into<String>>(mut self, globs: impl IntoIterator<Item = S>) -> Self {
        self.capabilities.device_nodes.extend(globs.into_iter().map(Into::into));
        self
    }

    /// Asks to mount folders and files of the node; absolute globs.
    #[must_use]
    pub fn mounts<S: Into<String>>(mut self, globs: impl IntoIterator<Item = S>) -> Self {
        self.capabilities.mounts.extend(globs.into_iter().map(Into::into));
        self
    }

    /// Asks to have programs of the node run as hooks; absolute paths.
    #[must_use]
    pub fn hooks<S: Into<String>>(mut self, paths: impl IntoIterator<Item = S>) -> Self {
        self.capabilities.hooks.extend(paths.into_iter().map(Into::into));
        self
    }

    /// Asks to set environment variables; names or globs.
    #[must_use]
    pub fn env<S: Into<String>>(mut self, names: impl IntoIterator<Item = S>) -> Self {
        self.capabilities.env.extend(names.into_iter().map(Into::into));
        self
    }

    /// Asks to move network interfaces into containers; names or globs.
    #[must_use]
    pub fn net_devices<S: Into<String>>(mut self, names: impl IntoIterator<Item = S>) -> Self {
        self.capabilities.net_devices.extend(names.into_iter().map(Into::into));
        self
    }

    /// Limits that the driver thinks right for itself.
    #[must_use]
    pub fn limits(mut self, limits: Limits) -> Self {
        self.limits = limits;
        self
    }

    /// Kernel subsystems whose events call for a discovery.
    #[must_use]
    pub fn events<S: Into<String>>(mut self, subsystems: impl IntoIterator<Item = S>) -> Self {
        self.event_subsystems.extend(subsystems.into_iter().map(Into::into));
        self
    }

    /// Seconds between discoveries when the kernel reports nothing.
    #[must_use]
    pub fn discovery_period_seconds(mut self, seconds: u32) -> Self {
        self.discovery_period_seconds = Some(seconds);
        self
    }

    /// A free fact for people and tools.
    #[must_use]
    pub fn annotation(mut self, key: impl Into<String>, value: impl Into<String>) -> Self {
        self.annotations.push((key.into(), value.into()));
        self
    }
}
