//! The operator's grant file.

use nodedock_model::grant::{self, Effective};

use crate::{Capabilities, DriverInfo};

/// An operator's grant file, read and compared by the code of the host.
///
/// ```
/// use nodedock_sdk::{DriverInfo, testing::Grant};
///
/// let grant = Grant::parse("{apiVersion: nodedock.dev/v1, kind: DriverGrant, deviceNodes: [/dev/fuse]}")?;
/// let info = DriverInfo::new("a.example.com", "0.1.0").device_nodes(["/dev/fuse", "/dev/kvm"]);
/// assert_eq!(grant.missing(&info), ["deviceNodes: /dev/kvm"]);
/// # Ok::<(), String>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Grant(grant::Grant);

impl Grant {
    /// Parses the text of a grant file, which is YAML.
    ///
    /// # Errors
    ///
    /// What is wrong, with line and column: an unknown key, an invalid glob, another `kind`.
    pub fn parse(text: &str) -> Result<Self, String> {
        grant::Grant::parse(text)
            .map(Self)
            .map_err(|error| error.to_string())
    }

    /// Returns the requested capabilities and limits that are not granted, one line each; the host keeps the driver `blocked` while
    /// there is any.
    pub fn missing(&self, info: &DriverInfo) -> Vec<String> {
        let limits = &info.limits;
        let limits = grant::requested_limits(
            limits.memory_mib,
            limits.wall_ms,
            limits.cpu_ms,
            limits.concurrent_calls,
        );
        grant::missing(&requested(&info.capabilities), &limits, &self.0)
    }

    /// Returns what is both requested and granted; an error names the invalid glob or pattern.
    pub(super) fn effective(&self, capabilities: &Capabilities) -> Result<Effective, String> {
        Effective::new(&requested(capabilities), &self.0).map_err(|error| error.to_string())
    }

    /// A grant of exactly these capabilities.
    pub(super) fn of(capabilities: &Capabilities) -> Self {
        Self(grant::Grant {
            allowed: requested(capabilities),
            ..grant::Grant::default()
        })
    }
}

/// The capabilities as the host knows them.
pub(super) fn requested(capabilities: &Capabilities) -> grant::Capabilities {
    let write = |write: &crate::WriteRequest| grant::ValueGrant {
        glob: write.glob.clone(),
        pattern: write.pattern.clone(),
    };
    let bind = |bind: &crate::BindRequest| grant::ValueGrant {
        glob: bind.functions.clone(),
        pattern: bind.drivers.clone(),
    };
    grant::Capabilities {
        sysfs_read: capabilities.sysfs_read.clone(),
        sysfs_write: capabilities.sysfs_write.iter().map(write).collect(),
        host_files: capabilities.host_files.clone(),
        pci_driver: capabilities.pci_driver.iter().map(bind).collect(),
        device_nodes: capabilities.device_nodes.clone(),
        mounts: capabilities.mounts.clone(),
        hooks: capabilities.hooks.clone(),
        env: capabilities.env.clone(),
        net_devices: capabilities.net_devices.clone(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEAD: &str = "apiVersion: nodedock.dev/v1\nkind: DriverGrant\n";

    #[test]
    fn grant_is_compared_with_the_request() {
        let file = format!(
            "{HEAD}sysfsWrite: [{{glob: class/net/*/x, pattern: '[0-9]'}}]\nlimits: {{cpuMs: 100}}\n"
        );
        let grant = Grant::parse(&file).unwrap();
        let request = |glob, pattern| DriverInfo::new("a", "1.0.0").sysfs_write(glob, pattern);
        assert_eq!(
            grant.missing(&request("class/net/eth0/x", "[0-9]")),
            Vec::<String>::new()
        );
        let refused = grant.missing(&request("class/net/eth0/x", ".*"));
        assert_eq!(refused, ["sysfsWrite: class/net/eth0/x with .*"]);
        let mut slow = request("class/net/eth0/x", "[0-9]");
        slow.limits.cpu_ms = Some(200);
        assert_eq!(grant.missing(&slow), ["limits.cpuMs: 200"]);
    }

    #[test]
    fn wrong_kind_or_key_is_refused() {
        let error = Grant::parse("apiVersion: v1\nkind: ConfigMap\n").unwrap_err();
        assert!(error.contains("nodedock.dev/v1"), "{error}");
        let error = Grant::parse(&format!("{HEAD}deviceNode: [/dev/fuse]\n")).unwrap_err();
        assert!(error.contains("deviceNode"), "{error}");
    }
}
