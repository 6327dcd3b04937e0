//! Devices that a driver sees and does not offer, or that the host does not take of a device plugin's list.

use crate::limit::LEFT_OUT_SHOWN_MAX;

/// A device that is not offered, and the reason. Each is one line.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct LeftOutDevice {
    /// Name by which a person finds the device on the node, or its ID.
    pub name: String,
    /// Why it is not offered, and what would change that.
    pub reason: String,
}

impl LeftOutDevice {
    pub fn new(name: impl Into<String>, reason: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            reason: reason.into(),
        }
    }
}

/// The devices of one source that are not offered: how many there are, and the first 256 by name.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LeftOut {
    count: usize,
    devices: Vec<LeftOutDevice>,
}

impl LeftOut {
    pub fn of(devices: Vec<LeftOutDevice>) -> Self {
        Self::counted(devices.len(), devices)
    }

    /// `count`: of all; `devices` may have only the first of them.
    pub fn counted(count: usize, mut devices: Vec<LeftOutDevice>) -> Self {
        devices.sort_unstable();
        devices.truncate(LEFT_OUT_SHOWN_MAX);
        Self { count, devices }
    }

    /// Returns the number of all that are left out.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Returns at most 256 of them, sorted by name.
    pub fn devices(&self) -> &[LeftOutDevice] {
        &self.devices
    }
}
