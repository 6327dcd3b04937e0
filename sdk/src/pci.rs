//! Addresses, roots and numbers of PCI functions, as sysfs has them.
//!
//! ```
//! use nodedock_sdk::pci;
//!
//! let address: pci::Address = "0000:3b:00.0".parse()?;
//! assert_eq!(address.label(), "0000-3b-00-0");
//! assert_eq!(pci::Address::from_label("0000-3b-00-0"), Some(address));
//! # Ok::<(), String>(())
//! ```

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Address of a function: domain, bus, device and function, such as `0000:3b:00.0`. The domain has 4 to 8 hex digits.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String")]
pub struct Address(String);

impl Address {
    /// Parses an address; `None` for any other text.
    pub fn parse(text: &str) -> Option<Self> {
        let (rest, function) = text.split_once('.')?;
        let mut parts = rest.split(':');
        let (domain, bus, device) = (parts.next()?, parts.next()?, parts.next()?);
        let fits = parts.next().is_none()
            && (4..=8).contains(&domain.len())
            && [bus.len(), device.len(), function.len()] == [2, 2, 1]
            && [domain, bus, device, function]
                .iter()
                .all(|part| is_lower_hex(part));
        fits.then(|| Address(text.to_owned()))
    }

    /// Parses the name of a device that [`label`](Address::label) made: `0000-3b-00-0`.
    pub fn from_label(label: &str) -> Option<Self> {
        let (rest, function) = label.rsplit_once('-')?;
        Self::parse(&format!("{}.{function}", rest.replace('-', ":")))
    }

    /// Returns the address as a DNS label: `0000-3b-00-0`.
    pub fn label(&self) -> String {
        self.0.replace([':', '.'], "-")
    }

    /// Returns the name of an environment variable: `PREFIX_0000_3B_00_0`.
    pub fn variable(&self, prefix: &str) -> String {
        format!(
            "{prefix}_{}",
            self.0.replace([':', '.'], "_").to_ascii_uppercase()
        )
    }

    /// Returns the text.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Returns the address at a distance in the same domain, as PCI Express counts them: bus, device and function are one number of 16
    /// bits. `None` beyond the last bus.
    pub fn plus(&self, distance: u32) -> Option<Self> {
        let (rest, function) = self.0.split_once('.')?;
        let mut parts = rest.split(':');
        let domain = parts.next()?;
        let number = |text: Option<&str>| u32::from_str_radix(text?, 16).ok();
        let (bus, device, function) = (
            number(parts.next())?,
            number(parts.next())?,
            number(Some(function))?,
        );
        let id = (bus << 8 | device << 3 | function).checked_add(distance)?;
        let (bus, device, function) = (id >> 8, id >> 3 & 0x1f, id & 7);
        (bus <= 0xff).then(|| Address(format!("{domain}:{bus:02x}:{device:02x}.{function}")))
    }
}

impl FromStr for Address {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Self::parse(text).ok_or_else(|| format!("{text:?} is not the address of a PCI function"))
    }
}

impl TryFrom<String> for Address {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

fn is_lower_hex(text: &str) -> bool {
    text.bytes()
        .all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

/// Returns the root of a function's path below `/sys`, such as `pci0000:00`, for the attribute `resource.kubernetes.io/pcieRoot`. On some
/// machines it is below other buses.
///
/// ```
/// use nodedock_sdk::pci;
///
/// assert_eq!(pci::root("devices/pci0000:3a/0000:3a:00.0/0000:3b:00.0").as_deref(), Some("pci0000:3a"));
/// assert_eq!(pci::root("devices/platform/pcie/x"), None);
/// ```
pub fn root(path: &str) -> Option<String> {
    let root = path.split('/').find(|segment| {
        let numbers = segment
            .strip_prefix("pci")
            .and_then(|rest| rest.split_once(':'));
        numbers.is_some_and(|(domain, bus)| {
            is_lower_hex(domain) && bus.len() == 2 && is_lower_hex(bus)
        })
    });
    root.map(str::to_owned)
}

/// Returns a number of a config, such as the vendor `0x10DE`, in the notation of sysfs.
///
/// # Errors
///
/// A sentence, if it is not `0x` and one of these numbers of hex digits.
pub fn normal_hex(number: &str, lengths: &[usize]) -> Result<String, String> {
    let number = number.to_ascii_lowercase();
    let digits = number.strip_prefix("0x").unwrap_or_default();
    if lengths.contains(&digits.len()) && is_lower_hex(digits) {
        return Ok(number);
    }
    let lengths: Vec<_> = lengths.iter().map(usize::to_string).collect();
    Err(format!(
        "{number:?} is not 0x and {} hex digits",
        lengths.join(" or ")
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn address_and_label_convert_both_ways() {
        let address = Address::parse("10000:e1:00.7").unwrap();
        assert_eq!(Address::from_label(&address.label()), Some(address.clone()));
        assert_eq!(address.variable("PCIDEVICE"), "PCIDEVICE_10000_E1_00_7");
        for text in [
            "",
            "0000:3b:00",
            "3b:00.0",
            "0000:3B:00.0",
            "0000:3b:00.0.1",
            "0000:3b:0g.0",
            "0:0:0:0:3b:00.0",
        ] {
            assert_eq!(Address::parse(text), None, "{text}");
        }
        assert_eq!(Address::from_label("0000-3b-..-0"), None);
    }

    #[test]
    fn offset_carries_into_device_and_bus() {
        let address = Address::parse("0000:3b:00.1").unwrap();
        for (distance, sum) in [
            (1, "0000:3b:00.2"),
            (7, "0000:3b:01.0"),
            (15, "0000:3b:02.0"),
            (255, "0000:3c:00.0"),
        ] {
            assert_eq!(address.plus(distance).unwrap().as_str(), sum, "{distance}");
        }
        assert_eq!(address.plus(0xc500), None);
    }

    #[test]
    fn root_is_the_first_pci_bus() {
        let below_platform = "devices/platform/soc/1.pcie/pci0001:00/0001:00:00.0";
        assert_eq!(root(below_platform).as_deref(), Some("pci0001:00"));
    }

    #[test]
    fn numbers_use_sysfs_notation() {
        assert_eq!(normal_hex("0x10DE", &[4]).as_deref(), Ok("0x10de"));
        for bad in ["10de", "0x10d", "0x10dg", "", "4318"] {
            normal_hex(bad, &[4]).unwrap_err();
        }
    }
}
