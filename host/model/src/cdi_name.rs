//! The names of CDI devices, `VENDOR/CLASS=DEVICE`, by the rules of the CDI libraries.

use super::limit::CDI_NAME_BYTES_MAX;
use super::name::is_identifier;

/// A vendor or a class: a letter, then letters, digits, `-`, `_` or `.`, and a letter or digit at the end.
pub fn is_cdi_vendor_or_class(name: &str) -> bool {
    name.starts_with(|c: char| c.is_ascii_alphabetic()) && is_identifier(name, b"-_.")
}

/// The part after `=`: letters, digits, `-`, `_`, `.` or `:` between a letter or digit at each end.
pub fn is_cdi_device_name(name: &str) -> bool {
    is_identifier(name, b"-_.:")
}

/// A qualified name, as a runtime accepts it.
pub fn is_cdi_qualified_name(name: &str) -> bool {
    let parts = name
        .split_once('=')
        .and_then(|(kind, device)| Some((kind.split_once('/')?, device)));
    name.len() <= CDI_NAME_BYTES_MAX
        && parts.is_some_and(|((vendor, class), device)| {
            is_cdi_vendor_or_class(vendor)
                && is_cdi_vendor_or_class(class)
                && is_cdi_device_name(device)
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn qualified_name_needs_all_three_parts() {
        for good in [
            "vendor.com/gpu=0",
            "k8s.gpu.nvidia.com/claim=1f-0",
            "v/c=a:b.c",
        ] {
            assert!(is_cdi_qualified_name(good), "{good}");
        }
        let long = format!("v/c={}", "d".repeat(CDI_NAME_BYTES_MAX));
        for bad in [
            "",
            "gpu=0",
            "v/c",
            "v/c=",
            "/c=d",
            "v/=d",
            "0v/c=d",
            "v/c=d/e",
            "v/c=-d",
            "v/c=d\n",
            long.as_str(),
        ] {
            assert!(!is_cdi_qualified_name(bad), "{bad:?}");
        }
    }
}
