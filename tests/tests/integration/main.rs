//! The real daemon on temporary roots. Each module is one promise; each test a sentence of it.

mod main_job;
