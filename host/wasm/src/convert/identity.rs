//! A driver's description of itself.

use std::time::Duration;

use super::{Checked, labels};
use crate::DriverInfo;
use crate::bindings::exports::nodedock::driver::identity as guest;
use nodedock_model::answer::{self, Description};
use nodedock_model::grant::{self, Capabilities, ValueGrant};
use nodedock_model::limit::{DISCOVERY_PERIOD, DISCOVERY_PERIOD_MAX, DISCOVERY_PERIOD_MIN};

pub(in super::super) fn driver_info(info: guest::DriverInfo) -> Checked<DriverInfo> {
    let guest::DriverInfo {
        name,
        version,
        summary,
        capabilities: asked,
        limits:
            guest::Limits {
                memory_mib,
                wall_ms,
                cpu_ms,
                concurrent_calls,
            },
        event_subsystems,
        discovery_period_seconds,
        annotations,
    } = info;
    let capabilities = capabilities(asked);
    let annotations = labels(annotations);
    let name = answer::description(&Description {
        name: &name,
        version: &version,
        summary: &summary,
        capabilities: &capabilities,
        event_subsystems: &event_subsystems,
        annotations: &annotations,
    })?;
    Ok(DriverInfo {
        name,
        version,
        summary,
        capabilities,
        limits: grant::requested_limits(memory_mib, wall_ms, cpu_ms, concurrent_calls),
        event_subsystems,
        discovery_period: period(discovery_period_seconds),
        annotations: annotations.into_iter().collect(),
    })
}

fn capabilities(asked: guest::Capabilities) -> Capabilities {
    let guest::Capabilities {
        sysfs_read,
        sysfs_write,
        host_files,
        pci_driver,
        device_nodes,
        mounts,
        hooks,
        env,
        net_devices,
    } = asked;
    let write =
        |guest::WriteRequest { glob, pattern }: guest::WriteRequest| ValueGrant { glob, pattern };
    let bind = |guest::BindRequest { functions, drivers }: guest::BindRequest| ValueGrant {
        glob: functions,
        pattern: drivers,
    };
    Capabilities {
        sysfs_read,
        sysfs_write: sysfs_write.into_iter().map(write).collect(),
        host_files,
        pci_driver: pci_driver.into_iter().map(bind).collect(),
        device_nodes,
        mounts,
        hooks,
        env,
        net_devices,
    }
}

/// A period beyond the bounds is clamped.
fn period(seconds: Option<u32>) -> Duration {
    let asked = seconds.map(|seconds| Duration::from_secs(seconds.into()));
    asked.map_or(DISCOVERY_PERIOD, |asked| {
        asked.clamp(DISCOVERY_PERIOD_MIN, DISCOVERY_PERIOD_MAX)
    })
}
