//! The requests of a claim, parsed for one allocation: a slot for each request and sub-request, with its class and compiled selectors.

use std::ops::Range;
use std::sync::Arc;

use k8s_openapi::api::resource::v1::{
    CapacityRequirements, DeviceClass, DeviceRequest, DeviceSelector, DeviceSubRequest,
    DeviceToleration, ExactDeviceRequest, ResourceClaim,
};
use nodedock_model::limit::{REQUESTS_MAX, SELECTORS_MAX, SUBREQUESTS_MAX};

use super::capacity::Amount;
use super::inventory::Inventory;
use super::selector_results::Column;

/// A request, or one of the sub-requests from which the first that is available is taken.
pub(super) struct Slot<'a> {
    pub(super) number: u32,
    /// The place of its request in the claim.
    pub(super) request: usize,
    /// `request` or `request/sub-request`.
    pub(super) name: String,
    /// Name of the request.
    pub(super) request_name: &'a str,
    pub(super) class: Arc<DeviceClass>,
    pub(super) selectors: Vec<SlotSelector>,
    /// None: all matching devices.
    pub(super) count: Option<usize>,
    pub(super) admin_access: bool,
    pub(super) tolerations: Option<&'a Vec<DeviceToleration>>,
    pub(super) capacities: Vec<(&'a str, Amount)>,
    pub(super) is_sub_request: bool,
}

pub(super) struct SlotSelector {
    pub(super) expression: String,
    /// True if the expression is of the class, not of the request.
    pub(super) of_class: bool,
    pub(super) column: Arc<Column>,
}

/// The slots of a claim in order, and which of them each request has.
pub(super) struct Requests<'a> {
    pub(super) slots: Vec<Slot<'a>>,
    by_request: Vec<Range<usize>>,
}

/// Fields that a request and a sub-request have in common.
struct RequestFields<'a> {
    class: &'a str,
    mode: Option<&'a str>,
    count: Option<i64>,
    admin_access: bool,
    selectors: Option<&'a Vec<DeviceSelector>>,
    tolerations: Option<&'a Vec<DeviceToleration>>,
    capacity: Option<&'a CapacityRequirements>,
}

impl<'a> From<&'a ExactDeviceRequest> for RequestFields<'a> {
    fn from(request: &'a ExactDeviceRequest) -> Self {
        Self {
            class: &request.device_class_name,
            mode: request.allocation_mode.as_deref(),
            count: request.count,
            admin_access: request.admin_access == Some(true),
            selectors: request.selectors.as_ref(),
            tolerations: request.tolerations.as_ref(),
            capacity: request.capacity.as_ref(),
        }
    }
}

impl<'a> From<&'a DeviceSubRequest> for RequestFields<'a> {
    fn from(request: &'a DeviceSubRequest) -> Self {
        Self {
            class: &request.device_class_name,
            mode: request.allocation_mode.as_deref(),
            count: request.count,
            admin_access: false,
            selectors: request.selectors.as_ref(),
            tolerations: request.tolerations.as_ref(),
            capacity: request.capacity.as_ref(),
        }
    }
}

impl<'a> Requests<'a> {
    /// Parses the requests of a claim. Fails with a sentence about the first request that no allocation can fulfil, regardless of the
    /// devices.
    pub(super) fn parse(
        claim: &'a ResourceClaim,
        inventory: &Inventory,
        classes: &impl Fn(&str) -> Option<Arc<DeviceClass>>,
    ) -> Result<Self, String> {
        let asked = claim
            .spec
            .devices
            .as_ref()
            .and_then(|devices| devices.requests.as_deref())
            .unwrap_or_default();
        if asked.len() > REQUESTS_MAX {
            return Err(format!(
                "the claim has {} requests, and at most {REQUESTS_MAX} are allowed",
                asked.len()
            ));
        }
        let mut requests = Self {
            slots: Vec::new(),
            by_request: Vec::new(),
        };
        for request in asked {
            let first = requests.slots.len();
            requests
                .add(request, inventory, classes)
                .map_err(|error| format!("request {:?}: {error}", request.name))?;
            requests.by_request.push(first..requests.slots.len());
        }
        Ok(requests)
    }

    fn add(
        &mut self,
        request: &'a DeviceRequest,
        inventory: &Inventory,
        classes: &impl Fn(&str) -> Option<Arc<DeviceClass>>,
    ) -> Result<(), String> {
        let sub_requests = request.first_available.as_deref().unwrap_or_default();
        if sub_requests.len() > SUBREQUESTS_MAX {
            return Err(format!(
                "it has {} sub-requests, and at most {SUBREQUESTS_MAX} are allowed",
                sub_requests.len()
            ));
        }
        let mut add = |name: String, asked: RequestFields<'a>, is_sub_request| {
            let slot = Slot {
                number: u32::try_from(self.slots.len()).unwrap_or(u32::MAX),
                request: self.by_request.len(),
                name,
                request_name: &request.name,
                class: classes(asked.class)
                    .ok_or_else(|| format!("there is no DeviceClass {:?}", asked.class))?,
                selectors: Vec::new(),
                count: count(&asked)?,
                admin_access: asked.admin_access,
                tolerations: asked.tolerations,
                capacities: capacities(asked.capacity)?,
                is_sub_request,
            };
            self.slots
                .push(slot.with_selectors(asked.selectors, inventory)?);
            Ok::<_, String>(())
        };
        match &request.exactly {
            _ if !sub_requests.is_empty() => sub_requests.iter().try_for_each(|sub_request| {
                let name = format!("{}/{}", request.name, sub_request.name);
                let added = add(name, sub_request.into(), true);
                added.map_err(|error| format!("sub-request {:?}: {error}", sub_request.name))
            }),
            Some(exactly) => add(request.name.clone(), exactly.into(), false),
            None => Err("it has neither `exactly` nor `firstAvailable`".to_owned()),
        }
    }

    /// Returns the fewest devices that the claim needs, with the number of devices of each slot.
    pub(super) fn fewest_devices(&self, of_slot: impl Fn(&Slot<'_>) -> usize) -> usize {
        (0..self.by_request.len())
            .map(|request| {
                self.of_request(request)
                    .iter()
                    .map(&of_slot)
                    .min()
                    .unwrap_or(0)
            })
            .fold(0, usize::saturating_add)
    }

    /// Returns the slots of a request; none after the last request.
    pub(super) fn of_request(&self, request: usize) -> &[Slot<'a>] {
        self.by_request
            .get(request)
            .and_then(|range| self.slots.get(range.clone()))
            .unwrap_or_default()
    }

    pub(super) fn slot(&self, number: u32) -> Option<&Slot<'a>> {
        self.slots.get(number as usize)
    }
}

impl Slot<'_> {
    fn with_selectors(
        mut self,
        of_request: Option<&Vec<DeviceSelector>>,
        inventory: &Inventory,
    ) -> Result<Self, String> {
        let class = Arc::clone(&self.class);
        let of_class = class
            .spec
            .selectors
            .iter()
            .flatten()
            .map(|selector| (selector, true));
        let of_request = of_request
            .into_iter()
            .flatten()
            .map(|selector| (selector, false));
        for (selector, of_class) in of_class.chain(of_request) {
            let cel = selector
                .cel
                .as_ref()
                .ok_or("a selector has no CEL expression")?;
            if self.selectors.len() == 2 * SELECTORS_MAX {
                return Err(format!(
                    "it has more than {} selectors with those of its class",
                    self.selectors.len()
                ));
            }
            let column = inventory.selector_results.column(&cel.expression);
            self.selectors.push(SlotSelector {
                expression: cel.expression.clone(),
                of_class,
                column,
            });
        }
        Ok(self)
    }

    pub(super) fn requested(&self, capacity: &str) -> Option<&Amount> {
        self.capacities
            .iter()
            .find(|(name, _)| *name == capacity)
            .map(|(_, amount)| amount)
    }

    /// Returns true if a list of requests in a constraint or a config names this slot.
    pub(super) fn is_named_in(&self, requests: &[String]) -> bool {
        requests
            .iter()
            .any(|name| name == self.request_name || *name == self.name)
    }
}

fn count(asked: &RequestFields<'_>) -> Result<Option<usize>, String> {
    match (asked.mode.unwrap_or("ExactCount"), asked.count.unwrap_or(1)) {
        ("All", _) => Ok(None),
        ("ExactCount", count @ 1..) => Ok(Some(usize::try_from(count).unwrap_or(usize::MAX))),
        ("ExactCount", count) => Err(format!("count is {count}, and must be positive")),
        (mode, _) => Err(format!(
            "allocation mode {mode:?} is neither `ExactCount` nor `All`"
        )),
    }
}

fn capacities(capacity: Option<&CapacityRequirements>) -> Result<Vec<(&str, Amount)>, String> {
    let requested = capacity
        .and_then(|capacity| capacity.requests.as_ref())
        .into_iter()
        .flatten();
    requested
        .map(|(name, quantity)| {
            let amount =
                Amount::parse(quantity).map_err(|error| format!("capacity {name}: {error}"))?;
            Ok((String::as_str(name), amount))
        })
        .collect()
}
