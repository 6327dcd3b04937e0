//! Devices that a driver sees and does not offer.

/// A device that is not in the inventory, and the reason.
///
/// ```
/// use nodedock_sdk::LeftOutDevice;
///
/// let device = LeftOutDevice::new("ttyS0", "the kernel writes its console to it");
/// assert_eq!(device.name, "ttyS0");
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LeftOutDevice {
    /// Name by which a person finds the device on the node, such as `0000:3b:00.0`: one line of at most 253 bytes, once in a list.
    pub name: String,
    /// Why it is not offered, and what would change that: one line of at most 1 KiB.
    pub reason: String,
}

impl LeftOutDevice {
    /// A device with the reason why it is not offered.
    pub fn new(name: impl Into<String>, reason: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            reason: reason.into(),
        }
    }
}
