//! Lines of the log about claims: one for each claim that a request prepares or unprepares. They are formatted only if the log has them.

use std::fmt;
use std::time::Instant;

use super::ClaimEnd;
use nodedock_base::clock::millis;
use nodedock_model::{AllocatedDevice, Allocation, ClaimRecord, DriverName, ObjectRef, Problem};

/// A request about a claim that has ended.
pub(crate) struct EndedRequest<'a> {
    /// As `namespace/name`.
    pub(crate) claim: &'a dyn fmt::Display,
    pub(crate) user: User<'a>,
    /// `None`: the claim is not allocated, or not known.
    pub(crate) allocation: Option<&'a Allocation>,
    /// The driver whose part was requested. `None`: all parts.
    pub(crate) part: Option<&'a DriverName>,
    pub(crate) started: Instant,
    pub(crate) request: &'a str,
}

impl EndedRequest<'_> {
    pub(crate) fn log_prepare(&self, end: Result<(), &Problem>) {
        let (claim, pod, request) = (self.claim, &self.user, self.request);
        let (driver, devices) = (self.drivers(), self.devices());
        let milliseconds = millis(self.started.elapsed());
        match end {
            Ok(()) => {
                tracing::info!(%claim, %pod, %driver, %devices, milliseconds, request, "claim prepared");
            }
            Err(problem) => {
                let code = &problem.code;
                tracing::info!(%claim, %pod, %driver, %devices, milliseconds, request, code, %problem, "prepare failed");
            }
        }
    }

    pub(crate) fn log_unprepare(&self, end: Result<ClaimEnd, &Problem>) {
        let (claim, pod, request) = (self.claim, &self.user, self.request);
        let (driver, devices) = (self.drivers(), self.devices());
        let milliseconds = millis(self.started.elapsed());
        match end {
            Ok(ClaimEnd::Kept) => {
                tracing::info!(%claim, %pod, %driver, %devices, milliseconds, request, "claim kept for others");
            }
            Ok(_) => {
                tracing::info!(%claim, %pod, %driver, %devices, milliseconds, request, "claim unprepared");
            }
            Err(problem) => {
                let code = &problem.code;
                tracing::info!(%claim, %pod, %driver, %devices, milliseconds, request, code, %problem, "unprepare failed");
            }
        }
    }

    /// The drivers of the request, each once.
    fn drivers(&self) -> List<impl Iterator<Item = &DriverName> + Clone> {
        let all = match self.part {
            Some(_) => None,
            None => self.allocation,
        };
        let devices = all.into_iter().flat_map(|all| &all.devices);
        let first_of_driver = devices.enumerate().filter_map(move |(number, device)| {
            let before = all.map_or(&[][..], |all| &all.devices[..number]);
            let is_first = before.iter().all(|other| other.driver != device.driver);
            is_first.then_some(&device.driver)
        });
        List(self.part.into_iter().chain(first_of_driver))
    }

    fn devices(&self) -> List<impl Iterator<Item = PoolDevice<'_>> + Clone> {
        let devices = self.allocation.into_iter().flat_map(|of| &of.devices);
        let requested =
            devices.filter(|device| self.part.is_none_or(|part| device.driver == *part));
        List(requested.map(PoolDevice))
    }
}

/// The user of a claim in a request.
pub(crate) enum User<'a> {
    Pod(&'a ObjectRef),
    /// All consumers of the claim, as its record has them. `None`: there is no record.
    Consumers(Option<&'a ClaimRecord>),
}

impl fmt::Display for User<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Pod(pod) => pod.fmt(f),
            Self::Consumers(record) => {
                let all = record.iter().flat_map(|record| {
                    let consumers = record.consumers().into_iter();
                    consumers
                        .map(move |consumer| format!("{}/{}", record.id.namespace, consumer.name))
                });
                List(all.collect::<Vec<_>>().iter()).fmt(f)
            }
        }
    }
}

/// A device as `pool/device`.
#[derive(Clone)]
struct PoolDevice<'a>(&'a AllocatedDevice);

impl fmt::Display for PoolDevice<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.0.pool, self.0.device)
    }
}

/// Items with commas between them.
struct List<I>(I);

impl<T: fmt::Display, I: Iterator<Item = T> + Clone> fmt::Display for List<I> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (number, item) in self.0.clone().enumerate() {
            let comma = if number == 0 { "" } else { "," };
            write!(f, "{comma}{item}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::manager::claims::fixtures::{allocation, driver, pod};

    #[test]
    fn line_names_drivers_and_devices_once() {
        let (claim, pod) = (pod("claim"), pod("a"));
        let allocation = allocation(&["gpu/0", "nic/1", "gpu/2"]);
        let part = driver("gpu");
        let mut ended = EndedRequest {
            claim: &claim,
            user: User::Pod(&pod),
            allocation: Some(&allocation),
            part: None,
            started: Instant::now(),
            request: "r",
        };
        assert_eq!(ended.user.to_string(), "default/a");
        assert_eq!(
            ended.drivers().to_string(),
            "gpu.example.com,nic.example.com"
        );
        assert_eq!(ended.devices().to_string(), "pool/0,pool/1,pool/2");
        ended.part = Some(&part);
        assert_eq!(ended.drivers().to_string(), "gpu.example.com");
        assert_eq!(ended.devices().to_string(), "pool/0,pool/2");
        (ended.allocation, ended.part) = (None, None);
        ended.user = User::Consumers(None);
        let empty = [
            ended.user.to_string(),
            ended.drivers().to_string(),
            ended.devices().to_string(),
        ];
        assert_eq!(empty, ["", "", ""]);
    }
}
