//! A driver's description of itself.

use std::time::Duration;

use super::{Checked, labels};
use crate::DriverInfo;
use crate::bindings::exports::nodedock::driver::identity as guest;
use nodedock_model::answer::{self, Description};
use nodedock_model::grant::{self, Capabilities, ValueGrant};
use nodedock_model::limit::{DISCOVERY_PERIOD, DISCOVERY_PERIOD_MAX, DISCOVERY_PERIOD_MIN};

pub(in super::super) fn driver_info(info: guest::DriverInfo) -> Checked<DriverInfo> {
    let capabilities = capabilities(info.capabilities);
    let annotations = labels(info.annotations);
    let name = answer::description(&Description {
        name: &info.name,
        version: &info.version,
        summary: &info.summary,
        capabilities: &capabilities,
        event_subsystems: &info.event_subsystems,
        annotations: &annotations,
    })?;
    let limits = &info.limits;
    Ok(DriverInfo {
        name,
        version: info.version,
        summary: info.summary,
        capabilities,
        limits: grant::requested_limits(
            limits.memory_mib,
            limits.wall_ms,
            limits.cpu_ms,
            limits.concurrent_calls,
        ),
        event_subsystems: info.event_subsystems,
        discovery_period: period(info.discovery_period_seconds),
        annotations: annotations.into_iter().collect(),
    })
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

/// A period beyond the bounds is clamped.
fn period(seconds: Option<u32>) -> Duration {
    let asked = seconds.map(|seconds| Duration::from_secs(seconds.into()));
    asked.map_or(DISCOVERY_PERIOD, |asked| {
        asked.clamp(DISCOVERY_PERIOD_MIN, DISCOVERY_PERIOD_MAX)
    })
}
