//! A driver's description of itself.

use std::time::Duration;

use super::{Checked, at_most, labels, line, name, refuse, shown, within};
use crate::bindings::exports::nodedock::driver::identity as guest;
use crate::{DriverInfo, Limit};
use nodedock_model::grant::{self, Capabilities, ValueGrant};
use nodedock_model::limit::{
    DISCOVERY_PERIOD, DISCOVERY_PERIOD_MAX, DISCOVERY_PERIOD_MIN, EVENT_SUBSYSTEMS_MAX,
    SUMMARY_BYTES_MAX,
};
use nodedock_model::{DriverName, is_cdi_vendor_or_class};

/// Bytes of a version, which is shown in tables.
const VERSION_BYTES_MAX: usize = 64;
/// Bytes of a kernel subsystem's name.
const SUBSYSTEM_BYTES_MAX: usize = 64;

pub(in super::super) fn driver_info(info: guest::DriverInfo) -> Checked<DriverInfo> {
    let driver = driver_name(&info.name)?;
    within(
        Limit::AnswerBytes,
        "bytes in the version",
        info.version.len(),
        VERSION_BYTES_MAX,
    )?;
    if let Err(error) = semver::Version::parse(&info.version) {
        return refuse(format!(
            "version {} is not a semantic version: {error}",
            shown(&info.version)
        ));
    }
    let capabilities = capabilities(info.capabilities);
    capabilities
        .check()
        .or_else(|why| refuse(format!("capabilities: {why}")))?;
    let limits = &info.limits;
    Ok(DriverInfo {
        name: driver,
        version: info.version,
        summary: line("the summary", info.summary, SUMMARY_BYTES_MAX)?,
        capabilities,
        limits: grant::requested_limits(
            limits.memory_mib,
            limits.wall_ms,
            limits.cpu_ms,
            limits.concurrent_calls,
        ),
        event_subsystems: subsystems(info.event_subsystems)?,
        discovery_period: period(info.discovery_period_seconds),
        annotations: labels("annotations", info.annotations)?,
    })
}

/// A driver's name is the vendor of its CDI devices, which has to begin with a letter. Kubernetes allows other names.
fn driver_name(text: &str) -> Checked<DriverName> {
    let driver = name(DriverName::new(text))?;
    if is_cdi_vendor_or_class(driver.as_str()) {
        return Ok(driver);
    }
    refuse(format!(
        "driver name {} begins with a digit, and the vendor of a CDI device with a letter",
        shown(text)
    ))
}

fn capabilities(asked: guest::Capabilities) -> Capabilities {
    let write = |write: guest::WriteRequest| ValueGrant {
        glob: write.glob,
        pattern: write.pattern,
    };
    let bind = |bind: guest::BindRequest| ValueGrant {
        glob: bind.functions,
        pattern: bind.drivers,
    };
    Capabilities {
        sysfs_read: asked.sysfs_read,
        sysfs_write: asked.sysfs_write.into_iter().map(write).collect(),
        host_files: asked.host_files,
        pci_driver: asked.pci_driver.into_iter().map(bind).collect(),
        device_nodes: asked.device_nodes,
        mounts: asked.mounts,
        hooks: asked.hooks,
        env: asked.env,
        net_devices: asked.net_devices,
    }
}

fn subsystems(names: Vec<String>) -> Checked<Vec<String>> {
    at_most("event subsystems", names.len(), EVENT_SUBSYSTEMS_MAX)?;
    for subsystem in &names {
        let plain = subsystem
            .bytes()
            .all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.'));
        if subsystem.is_empty() || subsystem.len() > SUBSYSTEM_BYTES_MAX || !plain {
            return refuse(format!(
                "event subsystem {} is not a name such as pci or drm",
                shown(subsystem)
            ));
        }
    }
    Ok(names)
}

/// A period beyond the bounds is clamped.
fn period(seconds: Option<u32>) -> Duration {
    let asked = seconds.map(|seconds| Duration::from_secs(seconds.into()));
    asked.map_or(DISCOVERY_PERIOD, |asked| {
        asked.clamp(DISCOVERY_PERIOD_MIN, DISCOVERY_PERIOD_MAX)
    })
}
