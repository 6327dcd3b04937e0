//! Answers to a preparation.

use serde::Serialize;

use crate::{AllocatedDevice, Claim, Edits, Problem};

/// Something that is so, or is not, about a device; as in Kubernetes' conditions.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Condition {
    /// Its type, such as `Ready`.
    pub kind: String,
    /// None means unknown.
    pub status: Option<bool>,
    /// One word in CamelCase.
    pub reason: String,
    /// For people.
    pub message: String,
}

/// Network facts about a device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NetworkData {
    /// Its name in the container.
    pub interface_name: String,
    /// Addresses in CIDR notation.
    pub ips: Vec<String>,
    /// Hardware address.
    pub hardware_address: String,
}

/// Goes into the claim's `status.devices`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeviceStatus {
    /// What is so about the device.
    pub conditions: Vec<Condition>,
    /// JSON object of at most 10 KiB.
    pub data: Option<String>,
    /// Network facts.
    pub network: Option<NetworkData>,
}

/// A device that is ready, and what it changes in a container.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PreparedDevice {
    /// Requests that this device serves; base names, without subrequests.
    pub requests: Vec<String>,
    /// Pool of the device.
    pub pool: String,
    /// Name of the device.
    pub device: String,
    /// As allocated.
    pub share_id: Option<String>,
    /// For containers that use the device.
    pub edits: Edits,
    /// Goes into the claim's `status.devices`.
    pub status: Option<DeviceStatus>,
}

impl PreparedDevice {
    /// The answer for an allocated device.
    pub fn new(allocated: &AllocatedDevice, edits: Edits) -> Self {
        PreparedDevice {
            requests: vec![allocated.base_request().to_owned()],
            pool: allocated.pool.clone(),
            device: allocated.device.clone(),
            share_id: allocated.share_id.clone(),
            edits,
            status: None,
        }
    }

    /// The same with facts for the claim's `status.devices`.
    #[must_use]
    pub fn status(mut self, status: DeviceStatus) -> Self {
        self.status = Some(status);
        self
    }
}

/// The answer to the preparation of a claim.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Prepared {
    /// One entry for every device of the claim.
    pub devices: Vec<PreparedDevice>,
    /// Edits for every container that uses any of the devices.
    pub edits: Edits,
    /// For whoever starts the container: at most 16, handed on as they are.
    pub annotations: Vec<(String, String)>,
    /// At most 64 KiB, kept with the claim and handed back at `unprepare` and by the ledger.
    pub memo: Vec<u8>,
}

impl Prepared {
    /// An answer without devices yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// The answer for a claim whose devices are prepared one by one.
    ///
    /// # Errors
    ///
    /// The first problem that `edits` returns.
    ///
    /// ```
    /// use nodedock_sdk::{Claim, Edits, Prepared};
    ///
    /// let claim = Claim::new("default", "a", "uid").device("r", "misc", "fuse");
    /// let prepared = Prepared::each(&claim, |device| {
    ///     Ok(Edits::new().device_node(format!("/dev/{}", device.device)))
    /// })?;
    /// assert_eq!(prepared.devices[0].edits.device_nodes[0].path, "/dev/fuse");
    /// # Ok::<(), nodedock_sdk::Problem>(())
    /// ```
    pub fn each(
        claim: &Claim,
        mut edits: impl FnMut(&AllocatedDevice) -> Result<Edits, Problem>,
    ) -> Result<Self, Problem> {
        let mut prepared = Prepared::new();
        for device in &claim.devices {
            prepared = prepared.device(PreparedDevice::new(device, edits(device)?));
        }
        Ok(prepared)
    }

    /// The same with a device more.
    #[must_use]
    pub fn device(mut self, device: PreparedDevice) -> Self {
        self.devices.push(device);
        self
    }

    /// The same with edits for every container that uses any of the devices.
    #[must_use]
    pub fn edits(mut self, edits: Edits) -> Self {
        self.edits = edits;
        self
    }

    /// The same with an annotation for whoever starts the container.
    #[must_use]
    pub fn annotation(mut self, key: impl Into<String>, value: impl Into<String>) -> Self {
        self.annotations.push((key.into(), value.into()));
        self
    }

    /// The same, remembering this (as JSON, at most 64 KiB) until the claim is unprepared.
    ///
    /// # Errors
    ///
    /// `internal`, code `bad-memo`, if it cannot be written as JSON.
    pub fn with_memo(mut self, memo: &impl Serialize) -> Result<Self, Problem> {
        self.memo = serde_json::to_vec(memo)
            .map_err(|error| Problem::internal("bad-memo", format!("memo: {error}")))?;
        Ok(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::LiveClaim;

    #[test]
    fn a_prepared_device_serves_the_base_request_and_keeps_its_share() {
        let mut allocated = AllocatedDevice::new("gpu/small", "p", "d");
        allocated.share_id = Some("share".into());
        let device = PreparedDevice::new(&allocated, Edits::new());
        assert_eq!(device.requests, ["gpu"]);
        assert_eq!(device.share_id.as_deref(), Some("share"));
    }

    #[test]
    fn the_first_device_that_fails_fails_the_claim() {
        let claim = Claim::new("n", "c", "u").device("r", "p", "a").device("r", "p", "b");
        let result = Prepared::each(&claim, |device| match device.device.as_str() {
            "a" => Ok(Edits::new()),
            name => Err(Problem::not_found("gone", name)),
        });
        assert_eq!(result, Err(Problem::not_found("gone", "b")));
    }

    #[test]
    fn what_is_remembered_comes_back_with_the_live_claim() {
        let prepared = Prepared::new().with_memo(&vec![1, 2]).unwrap();
        let live = LiveClaim { memo: prepared.memo, ..LiveClaim::default() };
        assert_eq!(live.memo::<Vec<u32>>(), Ok(Some(vec![1, 2])));
    }
}
