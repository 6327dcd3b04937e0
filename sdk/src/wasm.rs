//! Connects a driver to the component model: bindings, imports and exports. Internal to the SDK.
//!
//! The bindings' export macros are public, so that their exports and the custom sections that describe them are generated in the
//! crate that calls [`export_driver!`](crate::export_driver), and only for the facets that it names.

pub mod bindings {
    //! Bindings that wit-bindgen generates for the world `driver`.
    wit_bindgen::generate!({
        path: "wit",
        world: "driver",
        pub_export_macro: true,
        export_macro_name: "__export_driver_world",
        generate_unused_types: true,
    });
}

pub mod configuration {
    //! Bindings that wit-bindgen generates for the world `configuration-facet`.
    wit_bindgen::generate!({
        path: "wit",
        world: "configuration-facet",
        pub_export_macro: true,
        export_macro_name: "__export_configuration_facet",
        with: { "nodedock:driver/common@0.2.0": crate::wasm::bindings::nodedock::driver::common },
    });
}

pub mod health {
    //! Bindings that wit-bindgen generates for the world `health-facet`.
    wit_bindgen::generate!({
        path: "wit",
        world: "health-facet",
        pub_export_macro: true,
        export_macro_name: "__export_health_facet",
        with: { "nodedock:driver/common@0.2.0": crate::wasm::bindings::nodedock::driver::common },
    });
}

pub mod telemetry {
    //! Bindings that wit-bindgen generates for the world `telemetry-facet`.
    wit_bindgen::generate!({
        path: "wit",
        world: "telemetry-facet",
        pub_export_macro: true,
        export_macro_name: "__export_telemetry_facet",
        with: { "nodedock:driver/common@0.2.0": crate::wasm::bindings::nodedock::driver::common },
    });
}

pub mod left_out {
    //! Bindings that wit-bindgen generates for the world `left-out-facet`.
    wit_bindgen::generate!({
        path: "wit",
        world: "left-out-facet",
        pub_export_macro: true,
        export_macro_name: "__export_left_out_facet",
        with: { "nodedock:driver/common@0.2.0": crate::wasm::bindings::nodedock::driver::common },
    });
}

pub mod scheduling {
    //! Bindings that wit-bindgen generates for the world `scheduling-facet`.
    wit_bindgen::generate!({
        path: "wit",
        world: "scheduling-facet",
        pub_export_macro: true,
        export_macro_name: "__export_scheduling_facet",
        with: {
            "nodedock:driver/common@0.2.0": crate::wasm::bindings::nodedock::driver::common,
            "nodedock:driver/inventory@0.2.0": crate::wasm::bindings::nodedock::driver::inventory,
        },
    });
}

mod convert;
mod exports;
#[cfg_attr(
    not(target_family = "wasm"),
    expect(dead_code, reason = "tests only compile it")
)]
mod imports;

pub use exports::Exported;
#[cfg(target_family = "wasm")]
pub(crate) use imports::Imports;
