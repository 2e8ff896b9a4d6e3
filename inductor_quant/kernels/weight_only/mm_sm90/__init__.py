"""One kernel for every weight format on sm_90."""
