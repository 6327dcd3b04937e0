//! The constraints of a claim: `matchAttribute` and `distinctAttribute` over the devices that are chosen so far.

use std::collections::HashMap;
use std::rc::Rc;

use k8s_openapi::api::resource::v1::{Device, DeviceAttribute, DeviceConstraint};
use nodedock_model::limit::CONSTRAINTS_MAX;

use super::inventory::{Inventory, Offered};
use super::request::{Requests, Slot};
use super::table::Table;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Match,
    Distinct,
}

/// Numbers of the values of an attribute, ascending. A scalar has one. None: the device does not have the attribute.
type Values = Option<Rc<[u32]>>;

/// A value of an attribute. Values of different types are never equal.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Value {
    Int(i64),
    Bool(bool),
    String(String),
    Version(String),
}

/// One constraint and what it has seen of the devices that are chosen.
pub(super) struct Constraint<'a> {
    kind: Kind,
    attribute: &'a str,
    applies: Table<bool>,
    of_device: Vec<Option<Values>>,
    numbers: HashMap<Value, u32>,
    /// Chosen devices with their values; for `matchAttribute`, the values that they have in common with those before them.
    chosen: Vec<(u32, Rc<[u32]>)>,
    /// Number of devices that the constraint kept out of a combination.
    pub(super) refused: u64,
}

/// Parses the constraints of a claim. Fails with a sentence about one that has no attribute.
pub(super) fn parse<'a>(
    constraints: &'a [DeviceConstraint],
    requests: &Requests<'_>,
    inventory: &Inventory,
) -> Result<Vec<Constraint<'a>>, String> {
    if constraints.len() > CONSTRAINTS_MAX {
        return Err(format!(
            "the claim has {} constraints, and at most {CONSTRAINTS_MAX} are allowed",
            constraints.len()
        ));
    }
    let numbered = constraints.iter().enumerate();
    numbered
        .map(|(number, constraint)| parse_one(number, constraint, requests, inventory))
        .collect()
}

fn parse_one<'a>(
    number: usize,
    constraint: &'a DeviceConstraint,
    requests: &Requests<'_>,
    inventory: &Inventory,
) -> Result<Constraint<'a>, String> {
    let (kind, attribute) = match (&constraint.match_attribute, &constraint.distinct_attribute) {
        (Some(attribute), _) => (Kind::Match, attribute),
        (None, Some(attribute)) => (Kind::Distinct, attribute),
        (None, None) => {
            return Err(format!(
                "constraint {number} has neither `matchAttribute` nor `distinctAttribute`"
            ));
        }
    };
    let named = constraint.requests.as_deref().unwrap_or_default();
    let mut applies = Table::new(requests.slots.len());
    for slot in &requests.slots {
        applies.set(slot.number, named.is_empty() || slot.is_named_in(named));
    }
    let of_device = vec![None; inventory.len()];
    let (numbers, chosen) = (HashMap::new(), Vec::new());
    Ok(Constraint {
        kind,
        attribute,
        applies,
        of_device,
        numbers,
        chosen,
        refused: 0,
    })
}

impl Constraint<'_> {
    /// Chooses a device if the constraint allows it beside those that are chosen.
    pub(super) fn add(&mut self, slot: &Slot<'_>, device: &Offered) -> bool {
        if !self.applies.get(slot.number) {
            return true;
        }
        let added = self.values(device).and_then(|values| self.allowed(values));
        match added {
            Some(values) => self.chosen.push((device.id, values)),
            None => {
                self.refused += 1;
                return false;
            }
        }
        true
    }

    /// Reverts the last [`Self::add`] that returned true.
    pub(super) fn remove(&mut self, slot: &Slot<'_>) {
        if self.applies.get(slot.number) {
            self.chosen.pop();
        }
    }

    fn allowed(&self, values: Rc<[u32]>) -> Option<Rc<[u32]>> {
        match self.kind {
            Kind::Match => match self.chosen.last() {
                None => Some(values),
                Some((_, common)) if *common == values => Some(values),
                Some((_, common)) => {
                    let both: Rc<[u32]> = common
                        .iter()
                        .copied()
                        .filter(|value| values.contains(value))
                        .collect();
                    (!both.is_empty()).then_some(both)
                }
            },
            Kind::Distinct => {
                let mut chosen = self.chosen.iter().flat_map(|(_, chosen)| chosen.iter());
                chosen
                    .all(|value| !values.contains(value))
                    .then_some(values)
            }
        }
    }

    /// Returns the numbers of a device's values, which are the same for devices that the constraint does not tell apart.
    pub(super) fn values(&mut self, device: &Offered) -> Values {
        if let Some(Some(known)) = self.of_device.get(device.id as usize) {
            return known.clone();
        }
        let attribute = attribute(device.device(), device.driver(), self.attribute);
        let found = attribute
            .and_then(values)
            .map(|values| self.numbered(values));
        if let Some(entry) = self.of_device.get_mut(device.id as usize) {
            *entry = Some(found.clone());
        }
        found
    }

    fn numbered(&mut self, values: Vec<Value>) -> Rc<[u32]> {
        let mut numbers: Vec<u32> = Vec::with_capacity(values.len());
        for value in values {
            let next = u32::try_from(self.numbers.len()).unwrap_or(u32::MAX);
            numbers.push(*self.numbers.entry(value).or_insert(next));
        }
        numbers.sort_unstable();
        numbers.dedup();
        numbers.into()
    }

    /// Returns the chosen device beside which a device was refused: of `distinctAttribute` the first with one of its values, else the last.
    pub(super) fn chosen_in_the_way(&mut self, refused: &Offered) -> Option<u32> {
        let is_distinct = matches!(self.kind, Kind::Distinct);
        let values = self.values(refused).filter(|_| is_distinct);
        let same = values.and_then(|values| {
            let mut chosen = self.chosen.iter();
            chosen.find(|(_, chosen)| chosen.iter().any(|value| values.contains(value)))
        });
        same.or(self.chosen.last()).map(|(device, _)| *device)
    }

    pub(super) fn title(&self) -> String {
        let kind = match self.kind {
            Kind::Match => "matchAttribute",
            Kind::Distinct => "distinctAttribute",
        };
        format!("{kind} {}", self.attribute)
    }

    /// Returns why a device was refused beside another one.
    fn shown(&self, device: &Offered) -> Option<String> {
        shown(attribute(device.device(), device.driver(), self.attribute))
    }

    pub(super) fn refusal(&self, device: &Offered, beside: Option<&Offered>) -> String {
        let title = self.title();
        match (
            self.shown(device),
            beside.and_then(|beside| Some((beside, self.shown(beside)?))),
        ) {
            (None, _) => format!("{title}: the device does not have it"),
            (Some(own), None) => format!("{title}: the device has {own}"),
            (Some(own), Some((beside, value))) => {
                format!(
                    "{title}: the device has {own}, and {beside}, which was chosen before, has {value}"
                )
            }
        }
    }
}

/// Returns an attribute by its qualified name. Names without a domain have that of the driver.
fn attribute<'a>(device: &'a Device, driver: &str, name: &str) -> Option<&'a DeviceAttribute> {
    let attributes = device.attributes.as_ref()?;
    attributes.get(name).or_else(|| {
        let (domain, id) = name.split_once('/')?;
        attributes.get(id).filter(|_| domain == driver)
    })
}

/// Returns nothing for an attribute without a value of a known type.
fn values(attribute: &DeviceAttribute) -> Option<Vec<Value>> {
    fn list<T: Clone>(list: &Option<Vec<T>>, value: fn(T) -> Value) -> Option<Vec<Value>> {
        let list = list.as_ref().filter(|list| !list.is_empty())?;
        Some(list.iter().cloned().map(value).collect())
    }
    fn scalar<T: Clone>(scalar: &Option<T>, value: fn(T) -> Value) -> Option<Vec<Value>> {
        scalar.clone().map(|scalar| vec![value(scalar)])
    }
    None.or_else(|| list(&attribute.ints, Value::Int))
        .or_else(|| list(&attribute.bools, Value::Bool))
        .or_else(|| list(&attribute.strings, Value::String))
        .or_else(|| list(&attribute.versions, Value::Version))
        .or_else(|| scalar(&attribute.int, Value::Int))
        .or_else(|| scalar(&attribute.bool, Value::Bool))
        .or_else(|| scalar(&attribute.string, Value::String))
        .or_else(|| scalar(&attribute.version, Value::Version))
}

fn shown(attribute: Option<&DeviceAttribute>) -> Option<String> {
    let values: Vec<String> = values(attribute?)?.iter().map(text).collect();
    Some(values.join(", "))
}

fn text(value: &Value) -> String {
    match value {
        Value::Int(value) => value.to_string(),
        Value::Bool(value) => value.to_string(),
        Value::String(value) | Value::Version(value) => format!("{value:?}"),
    }
}
