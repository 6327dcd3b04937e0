//! Consumption of a device's capacities by a request: the amount that the capacity's request policy makes of the requested one.

use std::collections::BTreeMap;

use k8s_openapi::api::resource::v1::{
    CapacityRequestPolicy, CapacityRequestPolicyRange, DeviceCapacity,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use nodedock_model::{CapacityChoice, Device, quantity};

const NANOS: i128 = 1_000_000_000;
const MILLI_NANOS: i128 = 1_000_000;

/// A quantity with its text, which a result repeats if no rounding changed it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Amount {
    pub(super) nanos: i128,
    pub(super) text: String,
}

impl Amount {
    pub(super) fn parse(quantity: &Quantity) -> Result<Self, String> {
        let nanos = quantity::nanos(&quantity.0)
            .ok_or_else(|| format!("{:?} is no quantity", quantity.0))?;
        Ok(Self {
            nanos,
            text: quantity.0.clone(),
        })
    }

    fn of_nanos(nanos: i128) -> Self {
        Self {
            nanos,
            text: quantity::of_nanos(nanos),
        }
    }
}

/// A capacity of a device.
#[derive(Debug, PartialEq, Eq, Hash)]
pub(super) struct Capacity {
    pub(super) name: String,
    pub(super) value: Amount,
    policy: Option<Policy>,
}

#[derive(Debug, Default, PartialEq, Eq, Hash)]
struct Policy {
    default: Option<Amount>,
    range: Option<Range>,
    values: Option<Vec<Amount>>,
}

#[derive(Debug, PartialEq, Eq, Hash)]
struct Range {
    min: Amount,
    max: Option<Amount>,
    step: Option<Amount>,
}

/// Returns a capacity of a driver's inventory as a ResourceSlice has it.
pub fn api_capacity(capacity: &nodedock_model::Capacity) -> DeviceCapacity {
    let quantity = |text: &String| Quantity(text.clone());
    let policy = capacity.policy.as_ref().map(|policy| {
        let (valid_values, valid_range) = match &policy.choice {
            CapacityChoice::Any => (None, None),
            CapacityChoice::Values(values) => (Some(values.iter().map(quantity).collect()), None),
            CapacityChoice::Range { min, max, step } => {
                let range = CapacityRequestPolicyRange {
                    min: quantity(min),
                    max: max.as_ref().map(quantity),
                    step: step.as_ref().map(quantity),
                };
                (None, Some(range))
            }
        };
        CapacityRequestPolicy {
            default: policy.default_amount.as_ref().map(quantity),
            valid_values,
            valid_range,
        }
    });
    DeviceCapacity {
        value: quantity(&capacity.value),
        request_policy: policy.filter(|policy| *policy != CapacityRequestPolicy::default()),
    }
}

/// Returns what a claim consumes of a device's capacities, by name, if it has the device without others: of each capacity the requested amount
/// as its policy rounds it, or the policy's default, or all of it.
///
/// # Errors
///
/// A requested amount is of no capacity of the device, or is no quantity, or its policy does not allow it, or the device has less. The text
/// names the capacity.
pub fn consumed(
    device: &Device,
    requested: &BTreeMap<String, String>,
) -> Result<BTreeMap<String, String>, String> {
    let capacities = device.capacities.iter();
    let capacities: BTreeMap<_, _> = capacities
        .map(|(name, capacity)| (name.to_string(), api_capacity(capacity)))
        .collect();
    if let Some(unknown) = requested
        .keys()
        .find(|name| !capacities.contains_key(*name))
    {
        return Err(format!("capacity {unknown}: the device does not have it"));
    }
    let consumed = parse(&capacities)?.into_iter().map(|capacity| {
        let amount = consumed_of(&capacity, requested.get(&capacity.name))
            .map_err(|why| format!("capacity {}: {why}", capacity.name))?;
        Ok((capacity.name, amount.text))
    });
    consumed.collect()
}

fn consumed_of(capacity: &Capacity, requested: Option<&String>) -> Result<Amount, String> {
    let requested = requested
        .map(|text| Amount::parse(&Quantity(text.clone())))
        .transpose()?;
    let amount = capacity.consumed(requested.as_ref())?;
    if !capacity.policy_allows(&amount) {
        let why = format!("its request policy does not allow {}", amount.text);
        return Err(why);
    }
    if amount.nanos > capacity.value.nanos {
        let (needed, has) = (&amount.text, &capacity.value.text);
        return Err(format!("needs {needed}, and the device has {has}"));
    }
    Ok(amount)
}

/// Parses the capacities of a device, in the order of their names. Fails with a sentence that names the capacity.
pub(super) fn parse(
    capacities: &BTreeMap<String, DeviceCapacity>,
) -> Result<Vec<Capacity>, String> {
    capacities
        .iter()
        .map(|(name, capacity)| {
            parse_one(name, capacity).map_err(|error| format!("capacity {name}: {error}"))
        })
        .collect()
}

fn parse_one(name: &str, capacity: &DeviceCapacity) -> Result<Capacity, String> {
    let value = Amount::parse(&capacity.value)?;
    let policy = capacity
        .request_policy
        .as_ref()
        .map(Policy::parse)
        .transpose()?;
    Ok(Capacity {
        name: name.to_owned(),
        value,
        policy,
    })
}

impl Policy {
    fn parse(policy: &CapacityRequestPolicy) -> Result<Self, String> {
        let values = policy.valid_values.as_ref();
        let values = values.map(|values| values.iter().map(Amount::parse).collect());
        Ok(Self {
            default: policy.default.as_ref().map(Amount::parse).transpose()?,
            range: policy.valid_range.as_ref().map(Range::parse).transpose()?,
            values: values.transpose()?,
        })
    }

    fn round_up(&self, requested: &Amount) -> Result<Amount, String> {
        match (&self.range, &self.values) {
            (Some(range), _) => range.round_up(requested),
            (None, Some(values)) => Ok(values
                .iter()
                .find(|value| value.nanos >= requested.nanos)
                .unwrap_or(requested)
                .clone()),
            (None, None) => Ok(requested.clone()),
        }
    }

    fn allows(&self, amount: &Amount) -> bool {
        if self
            .default
            .as_ref()
            .is_some_and(|default| default.nanos == amount.nanos)
        {
            return true;
        }
        match (&self.range, &self.values) {
            (Some(range), _) => range.allows(amount),
            (None, Some(values)) if !values.is_empty() => {
                values.iter().any(|value| value.nanos == amount.nanos)
            }
            _ => true,
        }
    }
}

impl Range {
    fn parse(range: &CapacityRequestPolicyRange) -> Result<Self, String> {
        let step = range.step.as_ref().map(Amount::parse).transpose()?;
        if step.as_ref().is_some_and(|step| step.nanos <= 0) {
            return Err("the step of its valid range is not positive".to_owned());
        }
        let max = range.max.as_ref().map(Amount::parse).transpose()?;
        Ok(Self {
            min: Amount::parse(&range.min)?,
            max,
            step,
        })
    }

    /// The unit that steps are counted in: a thousandth if the whole range is made of them, else one, as upstream.
    fn unit(&self) -> i128 {
        let amounts = [Some(&self.min), self.max.as_ref(), self.step.as_ref()];
        match amounts
            .into_iter()
            .flatten()
            .all(|amount| whole(amount.nanos, MILLI_NANOS).is_some())
        {
            true => MILLI_NANOS,
            false => NANOS,
        }
    }

    fn round_up(&self, requested: &Amount) -> Result<Amount, String> {
        let Some(step) = self
            .step
            .as_ref()
            .filter(|_| requested.nanos >= self.min.nanos)
        else {
            return Ok(if requested.nanos < self.min.nanos {
                &self.min
            } else {
                requested
            }
            .clone());
        };
        let unit = self.unit();
        let too_large = || {
            format!(
                "{} cannot be rounded to steps of {} in 64 bits",
                requested.text, step.text
            )
        };
        let amount = match unit {
            MILLI_NANOS => whole(requested.nanos, unit),
            _ => {
                Some(units(requested.nanos, unit)).filter(|amount| *amount <= i128::from(i64::MAX))
            }
        };
        let amount = amount.ok_or_else(too_large)?;
        let (min, step) = (units(self.min.nanos, unit), units(step.nanos, unit));
        let rounded = min + units(amount - min, step) * step;
        if rounded > i128::from(i64::MAX) {
            return Err(too_large());
        }
        Ok(if rounded == amount && amount * unit == requested.nanos {
            requested.clone()
        } else {
            Amount::of_nanos(rounded * unit)
        })
    }

    fn allows(&self, amount: &Amount) -> bool {
        if self
            .max
            .as_ref()
            .is_some_and(|max| amount.nanos > max.nanos)
        {
            return false;
        }
        let Some(step) = &self.step else { return true };
        let unit = self.unit();
        if unit == MILLI_NANOS && whole(amount.nanos, unit).is_none() {
            return false;
        }
        (units(amount.nanos, unit) - units(self.min.nanos, unit)) % units(step.nanos, unit) == 0
    }
}

/// Returns the number of units, rounded up. The unit is positive.
fn units(nanos: i128, unit: i128) -> i128 {
    nanos.div_euclid(unit) + i128::from(nanos.rem_euclid(unit) != 0)
}

/// Returns the number of units if it is a whole one in 64 bits.
fn whole(nanos: i128, unit: i128) -> Option<i128> {
    (nanos % unit == 0)
        .then_some(nanos / unit)
        .filter(|amount| i64::try_from(*amount).is_ok())
}

impl Capacity {
    /// Returns what a request consumes of this capacity: the requested amount rounded up, or the default, or all of it. Fails if the
    /// amount cannot be computed, which fails the allocation and not only this device.
    pub(super) fn consumed(&self, requested: Option<&Amount>) -> Result<Amount, String> {
        let policy = self.policy.as_ref();
        let amount = match (requested, policy) {
            (None, policy) => policy
                .and_then(|policy| policy.default.as_ref())
                .unwrap_or(&self.value)
                .clone(),
            (Some(requested), None) => requested.clone(),
            (Some(requested), Some(policy)) => policy.round_up(requested)?,
        };
        if amount.nanos < 0 {
            return Err(format!("{} is negative", amount.text));
        }
        Ok(amount)
    }

    pub(super) fn policy_allows(&self, amount: &Amount) -> bool {
        self.policy
            .as_ref()
            .is_none_or(|policy| policy.allows(amount))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn quantity(text: &str) -> Quantity {
        Quantity(text.to_owned())
    }

    fn capacity(value: &str, policy: Option<CapacityRequestPolicy>) -> Result<Capacity, String> {
        let capacity = DeviceCapacity {
            value: quantity(value),
            request_policy: policy,
        };
        let mut parsed = parse(&BTreeMap::from([("memory".to_owned(), capacity)]))?;
        Ok(parsed.remove(0))
    }

    fn range(min: &str, max: &str, step: &str) -> CapacityRequestPolicy {
        let given = |text: &str| (!text.is_empty()).then(|| quantity(text));
        let range = CapacityRequestPolicyRange {
            min: quantity(min),
            max: given(max),
            step: given(step),
        };
        CapacityRequestPolicy {
            valid_range: Some(range),
            default: Some(quantity(min)),
            ..Default::default()
        }
    }

    fn values(values: &[&str]) -> CapacityRequestPolicy {
        let values: Vec<_> = values.iter().map(|value| quantity(value)).collect();
        let default = values.first().cloned();
        CapacityRequestPolicy {
            default,
            valid_values: Some(values),
            ..Default::default()
        }
    }

    /// The amount that is consumed, with `!` if the policy does not allow it.
    fn consumed(
        policy: Option<CapacityRequestPolicy>,
        requested: Option<&str>,
    ) -> Result<String, String> {
        let capacity = capacity("64Gi", policy)?;
        let requested = requested.map(|text| Amount::parse(&quantity(text)).expect("a quantity"));
        let amount = capacity.consumed(requested.as_ref())?;
        let mark = if capacity.policy_allows(&amount) {
            ""
        } else {
            "!"
        };
        Ok(format!("{}{mark}", amount.text))
    }

    #[test]
    fn requests_are_rounded_per_request_policy() {
        let gi = || Some(range("2Gi", "16Gi", "4Gi"));
        for (policy, requested, expected) in [
            (None, None, "64Gi"),
            (None, Some("3Gi"), "3Gi"),
            (Some(CapacityRequestPolicy::default()), None, "64Gi"),
            (gi(), None, "2Gi"),
            (gi(), Some("1"), "2Gi"),
            (gi(), Some("2048Mi"), "2048Mi"),
            (gi(), Some("3Gi"), "6Gi"),
            (gi(), Some("15Gi"), "18Gi!"),
            (Some(range("1", "", "")), Some("2500m"), "2500m"),
            (Some(range("500m", "4", "250m")), Some("600m"), "750m"),
            (Some(range("0", "", "1")), Some("1500m"), "2"),
            (Some(values(&["1Gi", "2Gi", "8Gi"])), Some("3Gi"), "8Gi"),
            (Some(values(&["1Gi", "2Gi", "8Gi"])), Some("9Gi"), "9Gi!"),
            (Some(values(&["1Gi", "2Gi", "8Gi"])), None, "1Gi"),
        ] {
            assert_eq!(
                consumed(policy, requested).as_deref(),
                Ok(expected),
                "{requested:?}"
            );
        }
    }

    #[test]
    fn large_ranges_step_in_whole_units() {
        // 16Pi has no thousandths in 64 bits.
        let policy = || Some(range("1", "16Pi", "2"));
        assert_eq!(consumed(policy(), Some("3500m")).as_deref(), Ok("5"));
        let error = consumed(policy(), Some("9223372036854775808")).expect_err("too large");
        assert!(error.contains("64 bits"), "{error}");
    }

    #[test]
    fn incomputable_amounts_are_errors() {
        for (policy, requested, expected) in [
            (
                Some(range("0", "4", "1")),
                "1u",
                "1u cannot be rounded to steps of 1 in 64 bits",
            ),
            (None, "-1", "-1 is negative"),
            (
                Some(range("0", "4", "0")),
                "1",
                "capacity memory: the step of its valid range is not positive",
            ),
            (
                Some(range("x", "4", "1")),
                "1",
                "capacity memory: \"x\" is no quantity",
            ),
        ] {
            assert_eq!(consumed(policy, Some(requested)), Err(expected.to_owned()));
        }
    }

    #[test]
    fn share_consumes_request_or_default() {
        use nodedock_model::{CapacityPolicy, QualifiedName};
        let capacity = |value: &str, policy| nodedock_model::Capacity {
            value: value.to_owned(),
            policy,
        };
        let policy = CapacityPolicy {
            default_amount: Some("4Gi".to_owned()),
            choice: CapacityChoice::Range {
                min: "2Gi".to_owned(),
                max: Some("16Gi".to_owned()),
                step: Some("2Gi".to_owned()),
            },
        };
        let device = Device {
            capacities: [
                ("memory", capacity("64Gi", Some(policy))),
                ("cores", capacity("8", None)),
            ]
            .map(|(name, capacity)| (QualifiedName::new(name).unwrap(), capacity))
            .into(),
            ..Device::default()
        };
        let share = |requested: &[(&str, &str)]| {
            let requested = requested.iter().map(|(name, amount)| (*name, *amount));
            let requested = requested.map(|(name, amount)| (name.to_owned(), amount.to_owned()));
            super::consumed(&device, &requested.collect()).map(|share| {
                let amount = |name: &str| share[name].clone();
                [amount("memory"), amount("cores")]
            })
        };
        let amounts = |memory: &str, cores: &str| Ok([memory.to_owned(), cores.to_owned()]);
        assert_eq!(share(&[]), amounts("4Gi", "8"));
        assert_eq!(
            share(&[("memory", "5Gi"), ("cores", "2")]),
            amounts("6Gi", "2")
        );
        for (requested, says) in [
            (
                ("memory", "20Gi"),
                "capacity memory: its request policy does not allow",
            ),
            (
                ("cores", "9"),
                "capacity cores: needs 9, and the device has 8",
            ),
            (("cores", "many"), "capacity cores: \"many\" is no quantity"),
            (
                ("lanes", "1"),
                "capacity lanes: the device does not have it",
            ),
        ] {
            let why = share(&[requested]).unwrap_err();
            assert!(why.contains(says), "{why}");
        }
    }
}
