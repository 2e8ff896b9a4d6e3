"""Any packed int4 layout, few rows: words straight to the registers of mma.sync."""
